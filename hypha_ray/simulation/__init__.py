"""Simulation of a fleet around the scheduler's core: a virtual clock, workers, a server, a store and their messages."""
