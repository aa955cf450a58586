"""Outer optimizers beside Nesterov momentum: torch's own numbers, and the rate of each round."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from hypha_ray.config.training import OuterOptimizer
from hypha_ray.optim.schedules import outer_rate
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, blank, initial_momentum, reduce
from hypha_ray.store.snapshots import flattened_outer, named_outer
from hypha_ray.types import Entry, Flat, Layout

GROUP = "parameters/float32"
SIZE = 5000
LAYOUT = Layout((Entry("w", "float32", (SIZE,), 0, GROUP, 0, SIZE),))


def values(seed: int, scale: float = 1.0) -> Flat:
    array = (np.random.default_rng(seed).standard_normal(SIZE) * scale).astype(np.float32)
    array.flags.writeable = False
    return {GROUP: array}


def train(outer: OuterOptimizer, rounds: int) -> tuple[list[Flat], Flat]:
    """θ before the first round and after each, and the state after the last: two workers a round."""
    rules = ReduceSpec(LAYOUT, 0, outer, rounds=rounds)
    thetas, state = [values(0)], initial_momentum(LAYOUT, 0, outer.name)
    for number in range(rounds):
        theta = thetas[-1]
        deltas = [values(10 * number + worker, 1e-2) for worker in (1, 2)]
        received = [Received(w, 0, 1, {GROUP: theta[GROUP] + delta[GROUP]}) for w, delta in enumerate(deltas)]
        new, state, verdict = reduce(number, theta, state, received, rules, blank(LAYOUT, 0, outer.name))
        assert len(verdict.accepted) == 2
        thetas.append(new)
    return thetas, state


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_adam_is_torchs(schedule: str) -> None:
    outer = OuterOptimizer(
        name="adam", learning_rate=2e-3, betas=(0.8, 0.95), epsilon=1e-6, schedule=schedule, final_learning_rate=1e-4
    )
    thetas, state = train(outer, 6)
    oracle = torch.nn.Parameter(torch.from_numpy(thetas[0][GROUP].copy()))
    adam = torch.optim.Adam([oracle], betas=(0.8, 0.95), eps=1e-6)
    for number, theta in enumerate(thetas[1:]):
        adam.param_groups[0]["lr"] = outer_rate(outer, number, 6)
        deltas = [values(10 * number + worker, 1e-2)[GROUP] for worker in (1, 2)]
        oracle.grad = torch.from_numpy(-(deltas[0] + deltas[1]) / 2)
        adam.step()
        assert np.abs(theta[GROUP] - oracle.detach().numpy()).max() < 2e-6
    assert state.keys() == {f"first/{GROUP}", f"second/{GROUP}"}


def test_average_is_the_mean_itself_and_has_no_state() -> None:
    thetas, state = train(OuterOptimizer(name="average"), 3)
    plain, _ = train(OuterOptimizer(learning_rate=1.0, momentum=0.0), 3)
    assert all(np.array_equal(one[GROUP], other[GROUP]) for one, other in zip(thetas, plain, strict=True))
    assert state == {}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.8] * 5), ("linear", [0.8, 0.65, 0.5, 0.35, 0.2]), ("cosine", [0.8, 0.7121, 0.5, 0.2879, 0.2])],
)
def test_rate_goes_from_the_first_to_the_last_round(schedule: str, expected: list[float]) -> None:
    outer = OuterOptimizer(learning_rate=0.8, final_learning_rate=0.2, schedule=schedule)
    assert [outer_rate(outer, number, 5) for number in range(5)] == pytest.approx(expected, abs=1e-4)
    assert outer_rate(outer, 9, 5) == outer_rate(outer, 4, 5) and outer_rate(outer, 0, 1) == 0.8


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rate_falls_whatever_it_begins_with(schedule: str) -> None:
    outer = OuterOptimizer(name="adam", learning_rate=7e-3, schedule=schedule)
    rates = [outer_rate(outer, number, 5) for number in range(5)]
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(1e-3)


def test_scheduled_rate_is_what_the_step_is_made_with() -> None:
    outer = OuterOptimizer(learning_rate=1.0, momentum=0.0, final_learning_rate=0.0, schedule="linear")
    thetas, _ = train(outer, 3)
    steps = [np.abs(new[GROUP] - old[GROUP]).mean() for old, new in pairwise(thetas)]
    assert steps[1] == pytest.approx(steps[0] / 2, rel=0.1) and steps[2] == 0


@pytest.mark.parametrize("name", ["nesterov", "average", "adam"])
def test_state_is_stored_by_names_and_comes_back(name: str) -> None:
    entries = [Entry(f"t{f}", "float32", (2, 3), f, GROUP, 0, 6) for f in (0, 1)]
    layout = Layout(tuple(entries), fragments=2)
    flats = [initial_momentum(layout, fragment, name) for fragment in (0, 1)]
    for seed, flat in enumerate(flats):
        for key in flat:
            flat[key] = np.random.default_rng(seed + len(key)).standard_normal(6).astype(np.float32)
    tensors = named_outer(layout, flats)
    assert (
        set(tensors)
        == {
            "nesterov": {"t0", "t1"},
            "average": set(),
            "adam": {f"{f}/{slot}/{GROUP}" for f in (0, 1) for slot in ("first", "second")},
        }[name]
    )
    back = flattened_outer(layout, tensors)
    assert [flat.keys() for flat in back] == [flat.keys() for flat in flats]
    assert all(np.array_equal(a[key], b[key]) for a, b in zip(back, flats, strict=True) for key in b)
