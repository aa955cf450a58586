"""Slices on their way from shards and data nodes to workers."""
