"""Unit tests of driver."""
