"""Unit tests of traces."""
