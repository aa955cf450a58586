"""What is turned away before it is computed with, and norms that neither overflow nor vanish."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hypha_ray.codec import Form
from hypha_ray.server.gates import Received, admit, misfit, square_sum
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
    assert admitted == [] and rejected == [Rejection(4, f"{samples} samples")]


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
