"""Execution of the scheduler's commands; with its actor, the only modules of the scheduler that use Ray."""
