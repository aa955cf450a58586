"""Unit tests of worker."""
