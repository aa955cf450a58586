"""Figures as sums: the mean over all parts is that of all their samples together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.types import Sums, added, means

VALUES = st.lists(st.tuples(st.sampled_from(["reward", "entropy"]), st.integers(-9, 9)), min_size=1, max_size=30)


def sums_of(values: list[tuple[str, int]]) -> Sums:
    """One part a value."""
    return added({name: (float(value), 1.0)} for name, value in values)


@given(values=VALUES, cut=st.integers(0, 30))
def test_mean_does_not_depend_on_how_values_are_shared_out(values: list[tuple[str, int]], cut: int) -> None:
    together = means(added([sums_of(values[:cut]), sums_of(values[cut:])]))
    for name in ("reward", "entropy"):
        own = [value for other, value in values if other == name]
        assert (name in together) == bool(own)
        assert not own or together[name] == pytest.approx(sum(own) / len(own))


def test_figure_without_weight_is_left_out() -> None:
    assert means({"reward": (0.0, 0.0), "entropy": (3.0, 2.0)}) == {"entropy": 1.5}
