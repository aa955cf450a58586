"""Benchmarks of one GPU; a CPU stands in for it with a tiny model, to find mistakes before a card is paid for."""
