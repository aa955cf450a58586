"""Outer steps: torch's own numbers, the rate of each round, delayed Nesterov, and synchronous training."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_ray.codec import upward_codec
from hypha_ray.config import Job
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of, scatter, view
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.schedules import outer_rate
from hypha_ray.server.optimizer_step import ModelOptimizerStep
from hypha_ray.server.outer import SUM
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, blank, initial_momentum, reduce
from hypha_ray.store.snapshots import flattened_outer, named_outer
from hypha_ray.types import Entry, Flat, Layout, RoundProgress, Verdict
from tests.support.small_models import RESNET

GROUP = "parameters/float32"
SIZE = 5000
LAYOUT = Layout((Entry("w", "float32", (SIZE,), 0, GROUP, 0, SIZE),))
MEAN, COUNT = "buffers/float32", "buffers/int64"
SIZES = {GROUP: 300, MEAN: 3, COUNT: 2}
THREE_GROUPS = Layout(tuple(Entry(name, name.split("/")[1], (n,), 0, name, 0, n) for name, n in SIZES.items()))
OUTER = OuterOptimizer(learning_rate=0.7, momentum=0.9)
ASYNC = Sync(strategy="async")
PARAMETERS = "parameters/float32"
INNER = {"learning_rate": 1e-2, "momentum": 0.9, "schedule": "linear-with-warmup", "warmup_steps": 2, "clip_norm": 0.5}


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
    return ReduceSpec(THREE_GROUPS, 0, outer, sync, upward_codec(sync), rounds=10)


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


def job_of(name: str, **settings: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"type": "vision-classification", "config": RESNET},
            "inner_optimizer": {**INNER, "name": name, **settings},
            "rounds": {"update_rounds": 5},
            "sync": {"strategy": "sync"},
        }
    )


class Bench:
    """A server's state, and rounds on it."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        self.job, self.model = job, build_model(job.model, job.run.seed)
        self.layout: Layout = layout_of(self.model)
        self.theta, self.state = gather(self.model, self.layout, 0), dict[str, Any]()
        self.optimizer_step = ModelOptimizerStep(job, self.layout)

    def payload(self, seed: int, scale: float = 1.0) -> Flat:
        rng = np.random.default_rng(seed)
        found = {
            group: (rng.standard_normal(size) * (scale if group == PARAMETERS else 1)).astype(group.rpartition("/")[2])
            for group, size in self.layout.groups(0).items()
        }
        for array in found.values():
            array.flags.writeable = False
        return found

    def reduced(
        self, number: int, *payloads: Flat, optimizer_step: ModelOptimizerStep | None = None
    ) -> tuple[Flat, Flat, Verdict]:
        rules = ReduceSpec(
            self.layout,
            0,
            self.job.outer_optimizer,
            self.job.sync,
            optimizer_step=optimizer_step or self.optimizer_step,
        )
        received = [Received(worker, 0, 8, payload) for worker, payload in enumerate(payloads)]
        return reduce(number, self.theta, self.state, received, rules, blank(self.layout, 0))

    def go_on(self, number: int, *payloads: Flat) -> Verdict:
        self.theta, self.state, verdict = self.reduced(number, *payloads)
        for array in (*self.theta.values(), *self.state.values()):
            array.flags.writeable = False  # As in the object store.
        return verdict


def bits(*flats: Flat) -> list[tuple[str, bytes]]:
    return [(name, one[name].tobytes()) for one in flats for name in sorted(one)]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "Adafactor", "ASGD", "nadam", "RMSprop"])
def test_steps_are_those_of_torch_in_one_process(name: str) -> None:
    bench, job = Bench(job_of(name)), job_of(name)
    model = build_model(job.model, job.run.seed)
    plain = build_optimizer(model, job.inner_optimizer, 5)
    parameters = dict(model.named_parameters())
    for number in range(5):
        mean = bench.payload(number)
        for entry in bench.layout.entries:
            if entry.group == PARAMETERS:
                parameters[entry.name].grad = torch.from_numpy(view(entry, mean).copy())
        plain.step()
        verdict = bench.go_on(number, mean, mean)
    assert verdict.update_norm > 0
    assert np.array_equal(bench.theta[PARAMETERS], gather(model, bench.layout, 0)[PARAMETERS])


def test_mean_is_weighed_by_samples_and_buffers_are_merged() -> None:
    bench = Bench(job_of("sgd", momentum=0.0, weight_decay=0.0, clip_norm=1e9, schedule="constant", warmup_steps=0))
    one, other = bench.payload(1), bench.payload(2)
    rules = ReduceSpec(bench.layout, 0, bench.job.outer_optimizer, bench.job.sync, optimizer_step=bench.optimizer_step)
    received = [Received(0, 0, 30, one), Received(1, 0, 10, other)]
    theta, _, verdict = reduce(0, bench.theta, {}, received, rules)
    expected = bench.theta[PARAMETERS] - 1e-2 * (0.75 * one[PARAMETERS] + 0.25 * other[PARAMETERS])
    assert np.abs(theta[PARAMETERS] - expected).max() < 1e-7
    means = 0.75 * one["buffers/float32"] + 0.25 * other["buffers/float32"]
    assert np.abs(theta["buffers/float32"] - means).max() < 1e-6
    assert np.array_equal(theta["buffers/int64"], one["buffers/int64"])
    assert [round(accepted.norm, 3) for accepted in verdict.accepted] == [
        round(float(np.linalg.norm(payload[PARAMETERS])), 3) for payload in (one, other)
    ]
    assert verdict.update_norm == pytest.approx(float(np.linalg.norm(theta[PARAMETERS] - bench.theta[PARAMETERS])))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_server_that_took_no_step_before_takes_the_same_one(name: str) -> None:
    bench = Bench(job_of(name))
    for number in range(3):
        bench.go_on(number, bench.payload(number))
    fresh = ModelOptimizerStep(bench.job, bench.layout)
    there, anew = (
        bench.reduced(3, bench.payload(3), optimizer_step=optimizer_step)
        for optimizer_step in (bench.optimizer_step, fresh)
    )
    assert bits(*there[:2]) == bits(*anew[:2]) and there[2] == anew[2]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_gradient_is_an_absent_one_to_the_bit(value: float) -> None:
    bench = Bench(job_of("adamw"))
    bench.go_on(0, bench.payload(0))
    bad = {group: array.copy() for group, array in bench.payload(2).items()}
    bad[PARAMETERS][7] = value
    with_it = bench.reduced(1, bench.payload(1), bad)
    without = bench.reduced(1, bench.payload(1))
    assert bits(*with_it[:2]) == bits(*without[:2])
    assert [(one.worker, one.reason) for one in with_it[2].rejected] == [(1, f"non-finite values in {PARAMETERS}")]


@pytest.mark.parametrize(("name", "scale"), [("sgd", 1e36), ("adamw", 1e25)])
def test_step_that_overflows_leaves_weights_and_state_as_they_are(name: str, scale: float) -> None:
    bench = Bench(job_of(name, clip_norm=None, learning_rate=1e4))
    bench.go_on(0, bench.payload(0))
    theta, state, verdict = bench.reduced(1, bench.payload(1, scale))
    assert not verdict.accepted and "overflows" in verdict.rejected[0].reason
    assert theta is bench.theta and state is bench.state


def test_weights_of_16_bits_are_stepped_in_32() -> None:
    job = job_of("sgd", momentum=0.0, weight_decay=0.0, clip_norm=1e9, learning_rate=1e-5)
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": {**RESNET, "dtype": "bfloat16"}})})
    bench = Bench(job)
    assert {entry.dtype for entry in bench.layout.entries if entry.group == PARAMETERS} == {"bfloat16"}
    before = bench.theta[PARAMETERS]
    bench.go_on(2, bench.payload(0))
    moved = np.abs(bench.theta[PARAMETERS] - before)
    assert 0 < moved.max() < 1e-4 and (moved > 0).mean() > 0.9  # In bfloat16 most of them couldn't move at all.
    scatter(bench.model, bench.layout, 0, bench.theta)
