"""Authenticated connections that carry the messages of the bridge."""
