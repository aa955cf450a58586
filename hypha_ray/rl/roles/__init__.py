"""Roles of an island's models, and of what stands in a model's place."""
