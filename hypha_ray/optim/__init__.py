"""Optimizers, their schedules and their state, for workers and servers."""
