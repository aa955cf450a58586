"""Rounds with a barrier: every worker trains from the same weights, and waits for the result."""

from __future__ import annotations
