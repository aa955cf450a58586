"""Losses of a policy: one file each, with the contract in `token_losses`."""
