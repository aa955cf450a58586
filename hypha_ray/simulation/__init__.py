"""Simulation of fleets around the scheduler's core, predictions of runs from their records, and advice on exchanges."""
