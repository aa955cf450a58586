"""Unit tests of server."""
