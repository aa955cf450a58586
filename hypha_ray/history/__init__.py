"""Runs, as read from their directories: lists, accounts and comparisons, without Ray and without torch."""
