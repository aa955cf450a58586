"""Preparation of datasets: sources are read, encoded, packed and written as slices."""
