"""State of rounds and evaluations, and their records."""
