"""Unit tests of house."""
