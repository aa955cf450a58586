"""Roles of an island's models, and of functions in a model's place."""
