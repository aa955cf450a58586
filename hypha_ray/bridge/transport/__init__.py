"""Authenticated connections for the messages of the bridge."""
