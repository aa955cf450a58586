"""Unit tests of jobs."""
