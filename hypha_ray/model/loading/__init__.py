"""A model from a repository or a configuration: fetched, checked, built, and its weights compared with it."""
