"""Benchmarks of the validation loss that training reaches."""
