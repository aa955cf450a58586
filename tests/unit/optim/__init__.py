"""Unit tests of optim."""
