"""Rounds and evaluations: their state, and the records made of them."""
