"""Corpora become prepared datasets; data shards serve their slices."""
