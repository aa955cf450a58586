"""Unit tests of data."""
