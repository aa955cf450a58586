"""Repetition of a run: the command that stands for it, and what has changed since."""
