"""Benchmarks of what decides: the core, the planner, the streams of a fleet, and the market."""
