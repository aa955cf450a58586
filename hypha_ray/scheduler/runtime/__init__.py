"""Hands of the scheduler: the only modules beside its actor that know Ray."""
