"""Formats that deltas and weights are encoded in."""
