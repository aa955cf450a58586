"""Tests: cluster."""
