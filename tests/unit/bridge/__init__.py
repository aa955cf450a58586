"""Unit tests of bridge."""
