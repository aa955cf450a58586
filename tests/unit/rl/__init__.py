"""Unit tests of rl."""
