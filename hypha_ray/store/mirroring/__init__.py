"""Copies of a run directory in another place."""
