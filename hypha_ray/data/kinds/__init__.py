"""Kinds of samples, each from its source to the tensors of its slices."""
