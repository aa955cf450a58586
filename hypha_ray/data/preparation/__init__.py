"""Preparation of datasets: reading of sources, encoding, packing, and writing of slices."""
