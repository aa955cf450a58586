"""Validation metrics: one file each, with the contract in `metric`."""
