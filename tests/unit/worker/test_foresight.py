"""A worker's estimate of the outer step, and how it goes on from there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hypha_ray.config import Job
from hypha_ray.config.schema import Model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.model.loading.build import build_model
from hypha_ray.server.admission import Received
from hypha_ray.server.reduce import initial_momentum, reduce
from hypha_ray.server.spec import ReduceSpec
from hypha_ray.types import Entry, Flat, Layout
from hypha_ray.worker.inbox import Arrived
from hypha_ray.worker.training.foresight import Foresight
from hypha_ray.worker.training.local_weights import LocalWeights
from tests.support.worker_bench import CONFIG

GROUP, SIZE, ROUNDS = "parameters/float32", 40, 6
LAYOUT = Layout((Entry("w", "float32", (SIZE,), 0, GROUP, 0, SIZE),))
OUTER: list[dict[str, Any]] = [
    {"learning_rate": 0.7, "momentum": 0.9},
    {"learning_rate": 0.4, "momentum": 0.5, "schedule": "cosine"},
    {"name": "average"},
]


def misses(outer: dict[str, Any], deltas: np.ndarray) -> list[float]:
    """How far worker 0's estimates are from what the server makes of `deltas`: rounds × workers × elements."""
    job = Job.model_validate(
        {"outer_optimizer": outer, "rounds": {"update_rounds": ROUNDS}, "resources": {"num_workers": deltas.shape[1]}}
    )
    rules = ReduceSpec(LAYOUT, 0, job.outer_optimizer, rounds=ROUNDS)
    foresight, theta = Foresight(job), {GROUP: np.zeros(SIZE, np.float32)}
    momentum, found = initial_momentum(LAYOUT, 0, job.outer_optimizer.name), []
    for number, of_workers in enumerate(deltas):
        results: list[Flat] = [{GROUP: theta[GROUP] + delta} for delta in of_workers]
        guess = foresight.guess(number, 0, theta, results[0])
        received = [Received(worker, 0, 1, flat) for worker, flat in enumerate(results)]
        after, momentum, _ = reduce(number, theta, momentum, received, rules)
        found.append(float(np.abs(guess[GROUP] - after[GROUP]).max()))
        foresight.learn(number, 0, theta, after)
        theta = after
    return found


@pytest.mark.parametrize("outer", OUTER)
def test_estimate_of_a_single_worker_is_the_step_itself(outer: dict[str, Any]) -> None:
    deltas = np.random.default_rng(0).standard_normal((ROUNDS, 1, SIZE)).astype(np.float32)
    assert max(misses(outer, deltas)) < 1e-4


@pytest.mark.parametrize("outer", OUTER)
def test_estimate_knows_others_by_what_they_did_the_last_time(outer: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    steady = np.repeat(rng.standard_normal((1, 3, SIZE)), ROUNDS, axis=0).astype(np.float32)
    steady[:, 0] = rng.standard_normal((ROUNDS, SIZE))
    first, *later = misses(outer, steady)
    assert first > 0.1 and max(later) < 1e-4


def test_estimate_starts_anew_when_a_step_was_missed() -> None:
    job = Job()
    foresight, fresh = Foresight(job), Foresight(job)
    theta, result, after = ({GROUP: np.full(SIZE, value, np.float32)} for value in (0.0, 1.0, 0.3))
    foresight.guess(0, 0, theta, result)
    foresight.learn(0, 0, theta, after)
    assert not np.array_equal(foresight.guess(1, 0, after, result)[GROUP], fresh.guess(1, 0, after, result)[GROUP])
    foresight.forget()
    assert np.array_equal(foresight.guess(1, 0, after, result)[GROUP], fresh.guess(1, 0, after, result)[GROUP])


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
def test_what_was_trained_since_the_estimate_is_kept_in_the_part_that_mixing_says(mixing: float) -> None:
    model = build_model(Model(config=CONFIG), 0)
    layout = layout_of(model)
    live, theta = LocalWeights(model, layout, mixing, keeps=True), gather(model, layout, 0)
    after, guess = ({group: array + np.float32(more) for group, array in theta.items()} for more in (0.5, 0.25))
    live.merge(Arrived(0, True, {0: theta}))
    live.expect(0, guess)
    for parameter in model.parameters():
        parameter.data += 0.125
    live.merge(Arrived(1, False, {0: after}))
    expected = after[GROUP] + np.float32(mixing * 0.125)
    assert np.allclose(gather(model, layout, 0)[GROUP], expected, atol=1e-6)
    with live.global_weights():
        assert np.array_equal(gather(model, layout, 0)[GROUP], after[GROUP])
    assert np.allclose(gather(model, layout, 0)[GROUP], expected, atol=1e-6)
