"""Datasets of a job on the driver's side: where they are read from, and data nodes that serve them."""
