"""Advice on the settings of an exchange: proposals for a model's size, a fleet and its links, each with its reason."""
