"""Generators: machines that only respond to prompts, for all workers of a run."""
