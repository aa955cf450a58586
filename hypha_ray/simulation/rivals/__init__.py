"""Models of other ways to survive failures, and what they make of the failures of a simulated run."""
