"""The outer step of synchronous training: torch's own numbers, and a function of its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of, scatter, view
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.server.optimizer_step import ModelOptimizerStep
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, blank, reduce
from hypha_ray.types import Flat, Layout, Verdict
from tests.support.small_models import RESNET

PARAMETERS = "parameters/float32"
INNER = {"learning_rate": 1e-2, "momentum": 0.9, "schedule": "linear-with-warmup", "warmup_steps": 2, "clip_norm": 0.5}


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
