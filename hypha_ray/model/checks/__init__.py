"""Checks of a model's loss before it is trained or scored."""
