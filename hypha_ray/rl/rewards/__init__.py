"""Rewards of responses: functions without a model."""
