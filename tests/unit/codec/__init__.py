"""Unit tests of codec."""
