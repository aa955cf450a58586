"""Damaged deltas are damaged as they say, and the worker's own arrays stay whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.failpoints import arm, hits
from hypha_ray.types import Delta, Flat
from tests.support.worker_bench import Bench, plan_of

GROUP = "parameters/float32"


@pytest.fixture
def sent(tmp_path: Path) -> Any:
    """What a worker sends whose first payload is tampered with."""

    def send(action: str, parts: int = 1) -> Bench:
        log = tmp_path / f"{action}.jsonl"
        log.unlink(missing_ok=True)
        specs = [f"worker.payload:0={action}@1"]
        arm(specs, str(log))
        bench = Bench(testing={"failpoints": specs, "failpoint_log": str(log)})
        bench.parts = parts
        bench.run(plan_of(16))
        assert hits(log, "worker.payload") == 1
        return bench

    yield send
    arm([], None)


@pytest.fixture(scope="module")
def honest() -> Bench:
    return Bench().run(plan_of(16))


def test_factors_scale_the_difference_to_the_rounds_weights(sent: Any, honest: Bench) -> None:
    theta, weights = honest.theta[GROUP], honest.weights
    assert np.array_equal(sent("zero").weights, theta)
    np.testing.assert_allclose(sent("flip").weights, 2 * theta - weights, atol=1e-6)
    np.testing.assert_allclose(sent("huge").weights, theta + 1e6 * (weights - theta), rtol=1e-5)
    assert sent("flip").weights.dtype == np.float32


@pytest.mark.parametrize("action", ["nan", "inf"])
def test_one_value_is_not_finite(action: str, sent: Any, honest: Bench) -> None:
    weights = sent(action).weights
    assert str(weights[0]) == action and np.array_equal(weights[1:], honest.weights[1:])


def test_forms_are_wrong_as_named(sent: Any, honest: Bench) -> None:
    assert sent("shape").weights.shape == (honest.weights.size - 1,)
    assert sent("dtype").weights.dtype == np.float16
    damaged: Flat = sent("names").of(dict)[0]
    assert GROUP not in damaged and len(damaged) == len(honest.of(dict)[0])


def test_repeat_sends_everything_twice(sent: Any, honest: Bench) -> None:
    bench = sent("repeat", parts=2)
    first, second = bench.of(Delta)
    assert first == second and all(np.array_equal(part[GROUP], honest.weights) for part in bench.of(dict))


def test_stale_sends_it_as_of_the_round_before_and_then_rightly(sent: Any) -> None:
    bench = sent("stale", parts=2)
    assert [delta.round for delta in bench.of(Delta)] == [-1, 0]
    assert bench.names[-5:-1] == ["Delta", "dict", "Delta", "dict"]


def test_action_that_nobody_knows_is_an_error(sent: Any) -> None:
    with pytest.raises(ValueError, match="typo"):
        sent("typo")
