"""Tests of the records that travel."""
