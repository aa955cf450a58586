"""Unit tests of market."""
