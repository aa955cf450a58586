"""Trained models after their run: search for them, their cards, figures of a harness, and a hub to upload them to."""
