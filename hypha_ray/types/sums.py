"""Figures as sums, which add up over micro-batches, reports and workers; a mean is made where a record is written."""

from __future__ import annotations

Sums = dict[str, tuple[float, float]]
"""A figure's name to its sum and its weight, of which the figure is the quotient."""
