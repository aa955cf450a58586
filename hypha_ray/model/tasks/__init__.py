"""Kinds of models: what each is fed, and how its labels are made, masked and counted."""
