"""Unit tests of simulation."""
