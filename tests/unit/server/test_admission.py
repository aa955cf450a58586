"""What is turned away before it is computed with, and norms that neither overflow nor vanish."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hypha_ray.codec import Form
from hypha_ray.server.payloads import Received, admit, clip_scales, excessive, misfit, square_sum
from hypha_ray.types import Rejection

GROUP = "parameters/float32"
FORM = {GROUP: Form("float32", 6)}


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
