"""Checks before a start, of settings, dataset and model; and advice on allowed settings."""
