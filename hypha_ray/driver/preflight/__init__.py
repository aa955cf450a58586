"""Checks before a start: settings, dataset, model, and both together; and advice on what is allowed."""
