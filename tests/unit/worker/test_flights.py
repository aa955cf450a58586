"""Several exchanges under way: inner loops against the algorithm itself, step by step, with results that come late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import fragments_of_round, version_due
from hypha_ray.model.layout import gather, layout_of, scatter
from hypha_ray.server.reduce import initial_momentum
from hypha_ray.types import Flat
from hypha_ray.worker.incarnation import BatchSource
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.replicas import BATCH, REPLICAS, ROUNDS, Fleet, job_of, outer_step, samples_of, steps

pytestmark = pytest.mark.usefixtures("one_thread")

FRAGMENTS = 3
WINDOW = 5
"""Steps of a round: more than a delay has, and not more than that needs."""
STEPS = ROUNDS * WINDOW


def step_by_step(job: Job) -> tuple[list[torch.nn.Module], list[Flat]]:
    """Models of the replicas, and global weights, where every result comes `in_flight` windows after its delta's."""
    trainers = [SupervisedTrainer(job) for _ in range(REPLICAS)]
    layout = layout_of(trainers[0].model, FRAGMENTS)
    batch_sources = [BatchSource(0) for _ in range(REPLICAS)]
    for replica, batch_source in enumerate(batch_sources):
        batch_source.put(replica, samples_of(replica))
    theta = [gather(trainers[0].model, layout, fragment) for fragment in range(FRAGMENTS)]
    momentum = [initial_momentum(layout, fragment) for fragment in range(FRAGMENTS)]
    on_its_way: dict[int, Flat] = {}
    for step in range(1, STEPS + 1):
        for replica, trainer in enumerate(trainers):
            trainer.optimizer.seek(0.0)
            trainer.step(batch_sources[replica].batch(steps(replica, 0, STEPS), (step - 1) * BATCH, BATCH))
        handed_over, over = divmod(step + job.sync.delay_steps, WINDOW)
        if not over:
            number = handed_over - 1
            (fragment,) = fragments_of_round(job, number)
            payloads = {replica: gather(one.model, layout, fragment) for replica, one in enumerate(trainers)}
            new = outer_step(job, layout, number, theta[fragment], momentum[fragment], payloads)
            theta[fragment], momentum[fragment] = new
            on_its_way[number] = theta[fragment]
        arrived, over = divmod(step, WINDOW)
        if not over and (number := arrived - job.sync.in_flight) >= 0:
            (fragment,) = fragments_of_round(job, number)
            for trainer in trainers:
                scatter(trainer.model, layout, fragment, on_its_way[number], job.sync.mixing)
    return [trainer.model for trainer in trainers], theta


@pytest.mark.slow
@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_results_are_merged_so_many_rounds_later_and_not_before(in_flight: int, delay: int, mixing: float) -> None:
    job = job_of(FRAGMENTS, delay, mixing, in_flight=in_flight)
    fleet = Fleet(job, WINDOW)
    fleet.run()
    models, theta = step_by_step(job)
    for fragment in range(FRAGMENTS):
        for group, flat in theta[fragment].items():
            assert np.array_equal(fleet.theta[fragment][group], flat), f"global weights of fragment {fragment}"
    for loop, model in zip(fleet.loops, models, strict=True):
        for name, own in loop._model.named_parameters():
            assert torch.equal(own, model.get_parameter(name)), f"local {name}"


def numbers(**tables: Any) -> list[int]:
    rounds = {"update_rounds": 9, **tables.pop("rounds", {})}
    job = Job.model_validate({"rounds": rounds, "sync": {"fragments": 4, **tables}})
    return [version_due(job, number) for number in range(10)]


def test_weights_that_are_due_stay_behind_until_the_last_round_and_only_after_the_warm_up() -> None:
    assert numbers() == list(range(10))
    assert numbers(in_flight=3) == [0, 0, 0, 1, 2, 3, 4, 5, 8, 9]
    assert numbers(in_flight=3, rounds={"warmup_rounds": 3}) == [0, 1, 2, 3, 3, 3, 4, 5, 8, 9]
