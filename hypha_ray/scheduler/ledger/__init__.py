"""Ledger of samples: each is available, assigned, or used by a commit."""
