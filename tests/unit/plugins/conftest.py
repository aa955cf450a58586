"""Fixtures of tests of members that users bring."""

from tests.support.plugins import written

__all__ = ["written"]
