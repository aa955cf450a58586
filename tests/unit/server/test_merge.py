"""Payloads at the server: refusals before any computation, running means of them, and weights that go down coded."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hypha_ray.codec import Form, difference_codec, payload_bytes
from hypha_ray.server.merge import BLOCK, Values, ascending, fold, measure, merge_and_step, shares, sweep, trimmed_mean
from hypha_ray.server.payloads import (
    Received,
    add_left_out,
    admit,
    clip_scales,
    encode_result,
    excessive,
    misfit,
    split_state,
    square_sum,
)
from hypha_ray.types import Contribution, Flat, Rejection, Verdict

GROUP = "parameters/float32"
FORM = {GROUP: Form("float32", 6)}
CODEC = difference_codec("e3m0")
TAKEN = Verdict(3, (Contribution(0, 1, 8, 1.0),), (), 1.0)
SAMPLES = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


def ones(size: int = 6, dtype: str = "float32") -> np.ndarray:
    return np.ones(size, dtype)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({}, "groups  instead of parameters/float32"),
        ({"parameters/float16": ones()}, "groups parameters/float16 instead of parameters/float32"),
        ({GROUP: ones(), "extra": ones()}, "groups extra, parameters/float32 instead of parameters/float32"),
        ({GROUP: ones(dtype="float64")}, "dtype float64 of parameters/float32 instead of float32"),
        ({GROUP: ones(dtype="int32")}, "dtype int32 of parameters/float32 instead of float32"),
        ({GROUP: ones(dtype=">f4")}, "dtype >f4 of parameters/float32 instead of float32"),
        ({GROUP: ones(5)}, "shape (5,) of parameters/float32 instead of (6,), contiguous"),
        ({GROUP: ones().reshape(2, 3)}, "shape (2, 3) of parameters/float32 instead of (6,), contiguous"),
        ({GROUP: ones(12)[::2]}, "shape (6,) of parameters/float32 instead of (6,), contiguous"),
        ({GROUP: ones()[::-1]}, "shape (6,) of parameters/float32 instead of (6,), contiguous"),
        ({GROUP: ones()}, None),
    ],
)
def test_misfit_payload_of_wrong_form_names_the_difference(payload: dict[str, np.ndarray], reason: str | None) -> None:
    assert misfit(payload, FORM) == reason


def test_admit_sorts_by_worker_and_takes_the_newest_incarnation() -> None:
    received = [Received(worker, incarnation, 1, {GROUP: ones()}) for worker, incarnation in [(2, 0), (0, 1), (0, 3)]]
    admitted, rejected = admit(received, FORM)
    assert [(delta.worker, delta.incarnation) for delta in admitted] == [(0, 3), (2, 0)]
    assert rejected == [Rejection(0, "repeated: incarnation 3 of this worker is taken")]


@pytest.mark.parametrize("samples", [0, -5])
def test_admit_delta_without_samples_turns_it_away(samples: int) -> None:
    admitted, rejected = admit([Received(4, 0, samples, {GROUP: ones()})], FORM)
    assert admitted == [] and rejected == [Rejection(4, f"weight {samples}")]


@pytest.mark.parametrize(
    ("norms", "reasons"),
    [
        ([0.8, 1.2e6, 0.7, 0.9, 0.8], [None, "norm 1.2e+06 is more than 10 times the median 0.8", None, None, None]),
        ([1.0, 10.0, 1.0], [None, None, None]),
        ([1.0, math.nextafter(10.0, 11), 1.0], [None, "norm 10 is more than 10 times the median 1", None]),
        ([1e-300, 1e-3, 1e-300], [None, "norm 0.001 is more than 10 times the median 1e-300", None]),
        ([1e308, 1e308, 1e308], [None, None, None]),
        ([1.0, 1e9], [None, None]),
        ([5.0], [None]),
        ([0.0, 0.0, 7.0], [None, None, None]),
    ],
)
def test_excessive_norms_are_those_beyond_the_gate_where_three_can_be_compared(
    norms: list[float], reasons: list[str | None]
) -> None:
    assert excessive(norms, 10.0) == reasons


@pytest.mark.parametrize(
    ("norms", "scales"),
    [
        ([1.0, 4.0, 2.0], [1.0, 1.0, 1.0]),
        ([1.0, 8.0, 2.0], [1.0, 0.5, 1.0]),
        ([1.0, math.inf, 1.0], [1.0, 0.0, 1.0]),
        ([1.0, 8.0], [1.0, 1.0]),
        ([0.0, 0.0, 7.0], [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
        ([], []),
    ],
)
def test_clip_scales_bring_norms_down_to_twice_the_median_and_none_up(norms: list[float], scales: list[float]) -> None:
    assert clip_scales(norms, 2.0) == scales


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("size", [1, 4096, 10_000])
def test_square_sum_any_scale_is_exact_to_six_digits(scale: float, size: int) -> None:
    values = (np.random.default_rng(size).standard_normal(size) * scale).astype(np.float32)
    exact = float((values.astype(np.float64) ** 2).sum())
    assert square_sum(torch.from_numpy(values)) == pytest.approx(exact, rel=1e-6, abs=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_square_sum_with_one_bad_value_is_not_finite(bad: float, place: int) -> None:
    values = torch.zeros(10_000)
    values[place] = bad
    assert not math.isfinite(square_sum(values))


def flat(seed: int) -> Flat:
    array = np.random.default_rng(seed).standard_normal(3000).astype(np.float32)
    array.flags.writeable = False
    return {GROUP: array}


def once(theta: Flat, momentum: Flat, new: Flat) -> tuple[Flat, Flat, Flat, Verdict]:
    assert CODEC is not None
    own, residual = split_state(momentum)
    return encode_result("int8", CODEC, 1.0, theta, residual, ({GROUP: new[GROUP].copy()}, own, TAKEN))


def test_whole_weights_have_the_bfloat16_form_of_those_that_workers_have() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3000, generator=generator) * 0.02
    left_out = torch.randn(3000, generator=generator) * 1e-4
    whole = weights.clone()
    add_left_out(whole, left_out)
    shown = weights.bfloat16().view(torch.int16)
    assert torch.equal(whole.bfloat16().view(torch.int16), shown)
    stays = (weights + left_out).bfloat16().view(torch.int16) == shown
    assert 0.2 < stays.float().mean() < 0.9
    assert torch.equal(whole, torch.where(stays, weights + left_out, weights))


def test_what_is_residual_is_part_of_the_state_and_comes_back() -> None:
    theta, first, second = flat(0), flat(1), flat(2)
    new, state, payload, verdict = once(theta, first, second)
    assert state.keys() == {GROUP, f"left-out/{GROUP}"} and state[GROUP] is first[GROUP]
    assert verdict == replace(TAKEN, coded_bytes=payload_bytes(payload)) and verdict.coded_bytes > 0
    assert np.abs(new[GROUP] + state[f"left-out/{GROUP}"] - second[GROUP]).max() < 1e-6
    own, residual = split_state(state)
    assert own.keys() == residual.keys() == {GROUP}
    assert payload.keys() == {f"{GROUP}/codes", f"{GROUP}/scales"}


def test_same_arguments_give_the_same_bits() -> None:
    state = {GROUP: flat(1)[GROUP], f"left-out/{GROUP}": flat(5)[GROUP]}
    one, other = (once(flat(0), state, flat(2)) for _ in range(2))
    for a, b in zip(one[:3], other[:3], strict=True):
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_round_of_which_nothing_was_taken_changes_nothing() -> None:
    assert CODEC is not None
    theta, residual, nothing = flat(0), flat(5), Verdict(3, (), (), 0.0)
    new, state, payload, _ = encode_result("int8", CODEC, 1.0, theta, residual, (theta, {}, nothing))
    assert new is theta and state[f"left-out/{GROUP}"] is residual[GROUP] and payload == {}


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
