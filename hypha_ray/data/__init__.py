"""Preparation of datasets from corpora, and the data shards that serve their slices."""
