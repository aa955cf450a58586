"""Delayed Nesterov: a round's steps add up to one synchronous step, however its deltas come."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_ray.codec import upward_codec
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.server.outer import SUM
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, reduce
from hypha_ray.types import Entry, Flat, Layout, RoundProgress

GROUP, MEAN, COUNT = "parameters/float32", "buffers/float32", "buffers/int64"
SIZES = {GROUP: 300, MEAN: 3, COUNT: 2}
LAYOUT = Layout(tuple(Entry(name, name.split("/")[1], (n,), 0, name, 0, n) for name, n in SIZES.items()))
OUTER = OuterOptimizer(learning_rate=0.7, momentum=0.9)
ASYNC = Sync(strategy="async")


def flat(seed: int, scale: float = 1.0) -> Flat:
    rng = np.random.default_rng(seed)
    return {
        GROUP: (rng.standard_normal(SIZES[GROUP]) * scale).astype(np.float32),
        MEAN: rng.standard_normal(3).astype(np.float32),
        COUNT: np.array([seed, seed]),
    }


def deltas_of(workers: int, samples: list[int]) -> list[Received]:
    return [Received(worker, 1, samples[worker], flat(worker + 1, 0.1)) for worker in range(workers)]


def rules_of(sync: Sync, outer: OuterOptimizer = OUTER) -> ReduceSpec:
    return ReduceSpec(LAYOUT, 0, outer, sync, upward_codec(sync), rounds=10)


def arrive(
    theta: Flat, momentum: Flat, batches: list[list[Received]], rules: ReduceSpec, unit: int, round: int = 0
) -> tuple[Flat, Flat]:
    """Reduce one batch of deltas after the other, as one round."""
    size, count, weight = sum(map(len, batches)), 0, 0
    for step, batch in enumerate(batches):
        phase = RoundProgress(round, size, unit, count, weight)
        theta, momentum, verdict = reduce(step, theta, momentum, batch, replace(rules, phase=phase))
        assert len(verdict.accepted) == len(batch)
        count, weight = count + len(batch), weight + sum(delta.weight for delta in batch)
    return theta, momentum


def synchronous(
    theta: Flat, momentum: Flat, deltas: list[Received], outer: OuterOptimizer = OUTER
) -> tuple[Flat, Flat]:
    """θ and velocity after Nesterov's step on the weighted mean, in float64."""
    total = sum(delta.weight for delta in deltas)
    mean = sum(delta.weight / total * delta.payload[GROUP].astype(np.float64) for delta in deltas)
    velocity = outer.momentum * momentum[GROUP].astype(np.float64) + mean
    change = outer.learning_rate * (outer.momentum * velocity + mean)
    buffers = sum(delta.weight / total * delta.payload[MEAN].astype(np.float64) for delta in deltas)
    return {GROUP: theta[GROUP] + change, MEAN: buffers}, {GROUP: velocity}


def close(found: Flat, expected: Flat) -> None:
    for group, array in expected.items():
        np.testing.assert_allclose(found[group], array, rtol=2e-6, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    samples=st.lists(st.integers(1, 50), min_size=12, max_size=12),
    unit=st.integers(20, 300),
    uniform=st.booleans(),
)
def test_round_of_arrivals_in_any_batches_is_one_synchronous_step(
    cuts: list[int], samples: list[int], unit: int, uniform: bool
) -> None:
    weighting = "uniform" if uniform else "samples"
    deltas = deltas_of(sum(cuts), [1] * 12 if uniform else samples)
    theta, momentum = flat(100), {GROUP: flat(101, 0.1)[GROUP]}
    ends = np.cumsum([0, *cuts])
    batches = [deltas[start:stop] for start, stop in pairwise(ends)]
    rules = rules_of(Sync(strategy="async", weighting=weighting))
    found, state = arrive(theta, momentum, batches, rules, len(deltas) if uniform else unit)
    expected, velocity = synchronous(theta, momentum, deltas)
    close(found, expected)
    close(state, velocity)
    assert state.keys() == {GROUP}, "something of the round is left in the state that is committed"


def test_simultaneous_arrivals_give_the_synchronous_reducers_own_result() -> None:
    theta, momentum = flat(100), {GROUP: flat(101, 0.1)[GROUP]}
    deltas = deltas_of(4, [10, 20, 30, 40])
    found, state = arrive(theta, momentum, [deltas], rules_of(ASYNC), 100)
    weights = [
        delta._replace(payload={**delta.payload, GROUP: theta[GROUP] + delta.payload[GROUP]}) for delta in deltas
    ]
    expected, velocity, _ = reduce(0, theta, momentum, weights, rules_of(Sync()))
    close(found, expected)
    close(state, velocity)


def test_between_milestones_theta_moves_by_each_deltas_part_and_velocity_stays() -> None:
    theta, momentum = flat(100), {GROUP: flat(101, 0.1)[GROUP]}
    first, second = deltas_of(2, [30, 20])
    rules = replace(rules_of(ASYNC), phase=RoundProgress(0, 3, 100, 0, 0))
    new, state, _ = reduce(0, theta, momentum, [first], rules)
    np.testing.assert_allclose(new[GROUP], theta[GROUP] + 0.7 * 0.3 * first.payload[GROUP], rtol=1e-6, atol=1e-6)
    assert (state[GROUP] == momentum[GROUP]).all()
    new, state, verdict = reduce(1, new, state, [second], replace(rules, phase=RoundProgress(0, 3, 100, 1, 30)))
    moved = 0.3 * first.payload[GROUP] + 0.2 * second.payload[GROUP]
    np.testing.assert_allclose(state[SUM + GROUP], moved, rtol=1e-6, atol=1e-6)
    assert verdict.update_norm == pytest.approx(0.7 * 0.2 * np.linalg.norm(second.payload[GROUP]), rel=1e-5)


def test_undelayed_steps_are_those_of_momentum_with_a_part_of_each_delta() -> None:
    theta, momentum = flat(100), {GROUP: flat(101, 0.1)[GROUP]}
    deltas = deltas_of(3, [10, 20, 30])
    rules = rules_of(Sync(strategy="async", delayed_nesterov=False))
    found, state = arrive(theta, momentum, [[delta] for delta in deltas], rules, 60)
    weights, velocity = theta[GROUP].astype(np.float64), momentum[GROUP].astype(np.float64)
    for delta in deltas:
        part = delta.weight / 60 * delta.payload[GROUP].astype(np.float64)
        velocity = 0.9 * velocity + part
        weights = weights + 0.7 * (0.9 * velocity + part)
    close(found, {GROUP: weights})
    close(state, {GROUP: velocity})
    assert state.keys() == {GROUP}


def test_average_makes_the_weighted_mean_of_the_round() -> None:
    theta, deltas = flat(100), deltas_of(4, [10, 20, 30, 40])
    outer = OuterOptimizer(name="average")
    found, state = arrive(theta, {}, [deltas[:1], deltas[1:3], deltas[3:]], rules_of(ASYNC, outer), 100)
    close(found, synchronous(theta, {GROUP: theta[GROUP] * 0}, deltas, OuterOptimizer(learning_rate=1, momentum=0))[0])
    assert state == {}


def test_order_in_which_deltas_are_given_changes_no_bit() -> None:
    theta, momentum = flat(100), {GROUP: flat(101, 0.1)[GROUP]}
    deltas = deltas_of(4, [10, 20, 30, 40])
    rules = replace(rules_of(ASYNC), phase=RoundProgress(0, 9, 200, 2, 50))
    one, other = (reduce(0, theta, momentum, given, rules) for given in (deltas, deltas[::-1]))
    assert all((one[0][group] == other[0][group]).all() for group in theta)


def test_rejected_delta_is_an_absent_one_and_closes_no_round() -> None:
    theta, momentum = flat(100), {GROUP: flat(101, 0.1)[GROUP]}
    good, bad = deltas_of(2, [10, 20])
    bad.payload[GROUP][7] = np.nan
    rules = replace(rules_of(ASYNC), phase=RoundProgress(0, 2, 30, 0, 0))
    with_bad, without = (reduce(0, theta, momentum, given, rules) for given in ([good, bad], [good]))
    assert (with_bad[0][GROUP] == without[0][GROUP]).all()
    assert [one.worker for one in with_bad[2].rejected] == [1]
    assert SUM + GROUP in with_bad[1]


def test_single_delta_is_judged_by_the_norms_of_those_before() -> None:
    theta, momentum = flat(100), {GROUP: flat(101, 0.1)[GROUP]}
    (delta,) = deltas_of(1, [10])
    norm = float(np.linalg.norm(delta.payload[GROUP]))
    usual, small = ((norm,) * 4, (norm / 50,) * 4)
    phases = [RoundProgress(0, 4, 40, 0, 0, norms) for norms in (usual, small)]
    kept, gated = (reduce(0, theta, momentum, [delta], replace(rules_of(ASYNC), phase=phase))[2] for phase in phases)
    assert kept.accepted and not gated.accepted
    assert "times the median" in gated.rejected[0].reason
