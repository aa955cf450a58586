"""Model workers, and the ways to reach them."""
