"""Packed samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.rl.dataflow.requests import Meta, Sample, gather
from tests.support.packed import packed

groups = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6)


def _sample(lengths: list[list[int]], key: str = "ids", first: int = 0) -> Sample:
    numbers = iter(range(1 << 53, 1 << 54))  # more than a float32 holds
    rows = [[np.array([next(numbers) for _ in range(n)], dtype=np.int64) for n in group] for group in lengths]
    return packed([f"p{first + i}" for i in range(len(lengths))], {key: rows})


@given(groups, st.randoms())
def test_taken_apart_and_gathered_again_is_the_same(lengths: list[list[int]], random) -> None:  # type: ignore[no-untyped-def]
    sample = _sample(lengths)
    order = list(sample.ids)
    random.shuffle(order)
    cut = random.randint(0, len(order) - 1)
    parts = [sample.take(ids) for ids in (order[:cut], order[cut:]) if ids]

    joined = gather(parts).take(sample.ids)

    assert joined.meta == sample.meta
    np.testing.assert_array_equal(joined.data["ids"], sample.data["ids"])


def test_keys_are_added_by_id_whatever_the_order() -> None:
    sample, scores = _sample([[2], [3]]), packed(["p1", "p0"], {"score": [[np.array([1.0])], [np.array([0.0])]]})

    both = sample.update(scores)

    assert both.data["score"].tolist() == [0.0, 1.0]
    assert list(both.select(["score"]).data) == ["score"]


@pytest.mark.parametrize("lengths", [((1,),), ((1,), (2,), (3,))])
def test_lengths_for_other_ids_are_refused(lengths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="lengths for"):
        Meta(("a", "b"), {"ids": lengths})


def test_arrays_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows, its lengths add up to 2"):
        Sample(Meta(("a",), {"ids": ((2,),)}), {"ids": np.zeros(3)})


def test_an_id_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        gather([_sample([[1]]), _sample([[2]])])
