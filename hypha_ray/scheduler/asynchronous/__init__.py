"""Rounds without a barrier: each delta is merged as it arrives."""

from __future__ import annotations
