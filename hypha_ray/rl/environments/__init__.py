"""Environments: conversations of a policy with code, such as tools and games, which also rewards it."""
