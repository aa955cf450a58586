"""The running mean: right weights, and equal values stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_ray.server.merge import fold, shares

SAMPLES = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


def mean(rows: np.ndarray, weights: list[int]) -> np.ndarray:
    values = torch.from_numpy(rows)
    out, result = torch.empty(rows.shape[1]), None
    for value, share in zip(values, shares(weights), strict=True):
        result = fold(result, value, share, out)
    assert result is not None
    return result.numpy()


@given(SAMPLES, st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_running_mean_any_weights_is_the_weighted_mean(weights: list[int], seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((len(weights), 37)).astype(np.float32)
    exact = np.average(rows.astype(np.float64), axis=0, weights=weights)
    assert np.abs(mean(rows, weights) - exact).max() < 1e-6


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_running_mean_equal_weights_counts_every_worker_alike(workers: int) -> None:
    shown = mean(np.eye(workers, dtype=np.float32), [1] * workers)
    pairwise = np.array([2.0 ** (1 - workers), *(2.0 ** (k - workers) for k in range(1, workers))])
    assert np.abs(shown - 1 / workers).max() < 1e-7
    assert workers == 2 or np.abs(shown - pairwise).max() > 0.08


@given(SAMPLES, st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_running_mean_of_equal_values_is_that_value_to_the_bit(weights: list[int], values: list[float]) -> None:
    common = np.array(values, np.float32)
    assert mean(np.tile(common, (len(weights), 1)), weights).tobytes() == common.tobytes()


def test_running_mean_of_negative_zeros_keeps_their_sign() -> None:
    assert np.signbit(mean(np.full((7, 100), -0.0, np.float32), [1] * 7)).all()


def test_fold_leaves_its_inputs_alone() -> None:
    first, second, out = torch.ones(5), torch.full((5,), 3.0), torch.empty(5)
    assert fold(fold(None, first, 1.0, out), second, 0.25, out).tolist() == [1.5] * 5
    assert first.tolist() == [1.0] * 5 and second.tolist() == [3.0] * 5
