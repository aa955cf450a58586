"""Runs as their directories tell of them: lists, accounts and comparisons, without Ray and without torch."""
