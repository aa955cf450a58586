"""The running mean and its trimmed kin: right weights, and equal values stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hypha_ray.server.merge import BLOCK, Values, ascending, fold, measure, merge_and_step, shares, sweep, trimmed_mean
from hypha_ray.server.payloads import square_sum

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


ROWS = st.integers(1, 12).flatmap(
    lambda n: arrays.arrays(np.float32, (n, 7), elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=False))
)


@given(ROWS)
@settings(max_examples=80, deadline=None)
def test_ascending_sorts_every_coordinate_and_leaves_its_inputs_alone(rows: np.ndarray) -> None:
    before = rows.copy()
    assert np.array_equal(torch.stack(ascending(torch.from_numpy(rows).unbind())).numpy(), np.sort(rows, axis=0))
    assert np.array_equal(rows, before)


@pytest.mark.slow
@given(ROWS, st.integers(0, 15))
@settings(max_examples=80, deadline=None)
def test_trimmed_mean_any_number_of_values_is_the_mean_of_the_middle_ones(rows: np.ndarray, drop: int) -> None:
    workers = len(rows)
    found = trimmed_mean(workers, drop)(torch.from_numpy(rows).unbind(), torch.empty(7)).numpy()
    ordered = np.sort(rows.astype(np.float64), axis=0)
    exact = ordered[drop : workers - drop].mean(axis=0) if 2 * drop < workers else np.median(ordered, axis=0)
    assert np.abs(found - exact).max() < 1e-3


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("drop", [1, 5])
def test_sweep_of_several_blocks_merges_every_element_once_and_measures_all(drop: int, threads: int) -> None:
    size = 4 * BLOCK + 1001
    rows = np.random.default_rng(drop).standard_normal((5, size)).astype(np.float32)
    theta, result = torch.from_numpy(rows[0].copy()), torch.zeros(size)

    def step(merged: torch.Tensor, room: torch.Tensor, part: slice) -> float:
        return square_sum(result[part].add_(merged))

    values = Values(lambda part: [row[part] for row in torch.from_numpy(rows)], theta, False, [1.0] * 5)
    found, change = sweep(values, merge_and_step(values, trimmed_mean(5, drop), step), threads)
    exact = np.sort(rows, axis=0)[1:4].mean(axis=0) if drop == 1 else np.median(rows, axis=0)
    assert np.abs(result.numpy() - exact).max() < 1e-6
    assert change == pytest.approx(float((exact.astype(np.float64) ** 2).sum()), rel=1e-5)
    squares = ((rows - rows[0]).astype(np.float64) ** 2).sum(axis=1)
    assert found == pytest.approx(squares, rel=1e-5)
    assert measure(values) == measure(values, threads) == found
    halved = Values(values.read, theta, False, [0.5] * 5)
    assert measure(halved, threads) == pytest.approx(found, rel=1e-6)
