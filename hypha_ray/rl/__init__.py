"""Reinforcement learning on prompts: an island of DiLoCo is a worker whose batches are prompts."""
