"""Reward model: a sequence classifier that scores responses."""
