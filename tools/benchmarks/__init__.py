"""Benchmarks of `jobs/bench.py`, a file for each part of the system."""
