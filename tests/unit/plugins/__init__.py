"""Tests of the look-up of members that users bring."""
