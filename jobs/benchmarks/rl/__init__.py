"""Benchmarks of reinforcement learning."""
