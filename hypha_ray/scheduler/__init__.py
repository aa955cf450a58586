"""The brain: what every worker does next, decided without I/O, and the Ray actor around it."""
