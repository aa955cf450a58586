"""Predictions of a run from its own records: as it was, and with other settings."""
