"""Streaming DiLoCo, bit for bit as another implementation does it: torchft's, whose code shares nothing with ours."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Barrier, Thread
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from worker_bench import CONFIG

from hypha_ray.codec import Fp32
from hypha_ray.config import Job
from hypha_ray.fragments import Piece, exchanged
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.server.gates import Received
from hypha_ray.server.reducer import initial_momentum, reduce
from hypha_ray.server.rules import Rules
from hypha_ray.types import Delta, Flat, Plan, Source, Span
from hypha_ray.worker.desk import Desk
from hypha_ray.worker.feeder import Feeder
from hypha_ray.worker.loop import InnerLoop
from hypha_ray.worker.stepper import Stepper

local_sgd = pytest.importorskip("torchft.local_sgd", reason="torchft has wheels for Linux only")

REPLICAS, FRAGMENTS, STEPS, WINDOW, BATCH = 3, 2, 60, 10, 4
MODEL = {**CONFIG, "n_layer": 2}


def job_of(delay: int, mixing: float) -> Job:
    tables: dict[str, Any] = {
        "model": {"config": MODEL},
        "rounds": {"update_rounds": 1000, "max_batch_size": BATCH},
        "inner_optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0, "clip_norm": None},
        "outer_optimizer": {"learning_rate": 0.7, "momentum": 0.9},
        "sync": {"fragments": FRAGMENTS, "delay_steps": delay, "mixing": mixing, "weighting": "uniform"},
        "resources": {"num_workers": REPLICAS},
        "worker": {"device": "cpu"},
    }
    return Job.model_validate(tables)


def samples_of(replica: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(replica).integers(0, 50, (STEPS * BATCH, 16)).astype(np.int32)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def steps(replica: int, first: int, last: int) -> tuple[Span, ...]:
    return (Span(0, replica, first * BATCH, last * BATCH),) if first < last else ()


class Fleet:
    """Three inner loops, and in the place of scheduler and servers just what the algorithm says."""

    def __init__(self, job: Job) -> None:
        self.job, self.said = job, SimpleQueue[tuple[int, Any]]()
        model = build_model(job.model, 0)
        self.layout = layout_of(model, FRAGMENTS)
        self.theta = [gather(model, self.layout, fragment) for fragment in range(FRAGMENTS)]
        self._momentum = [initial_momentum(self.layout, fragment) for fragment in range(FRAGMENTS)]
        self._desks = [Desk() for _ in range(REPLICAS)]
        self.loops = [self._loop(replica, desk) for replica, desk in enumerate(self._desks)]

    def _loop(self, replica: int, desk: Desk) -> InnerLoop:
        feeder = Feeder(0)
        feeder.put(replica, samples_of(replica))
        return InnerLoop(self.job, Source("run", replica, 1), feeder, desk, lambda item: self.said.put((replica, item)))

    def run(self) -> None:
        threads = [Thread(target=loop.run, daemon=True) for loop in self.loops]
        for thread in threads:
            thread.start()
        self._send(0, range(FRAGMENTS), whole=True)
        delay = self.job.sync.delay_steps
        for number in range(STEPS // WINDOW):
            first, last = max(0, number * WINDOW - delay), (number + 1) * WINDOW - delay
            for replica, desk in enumerate(self._desks):
                ahead = steps(replica, last, last + delay)
                desk.assign(Plan(number, 0, steps(replica, first, last), BATCH, ahead=ahead))
            self._reduce(number)
            self._send(number + 1, exchanged(self.job, number), whole=False)
        for desk in self._desks:
            desk.assign(Plan(STEPS // WINDOW, 0, (), BATCH, final=True))
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _send(self, number: int, fragments: Any, whole: bool) -> None:
        for desk in self._desks:
            for fragment in fragments:
                desk.merge(Piece(number, fragment, len(fragments), whole), self.theta[fragment])

    def _reduce(self, number: int) -> None:
        (fragment,) = exchanged(self.job, number)
        payloads: dict[int, Flat] = {}
        while len(payloads) < REPLICAS:
            replica, item = self.said.get(timeout=60)
            assert not isinstance(item, Delta) or (item.round, item.fragments) == (number, 1)
            if isinstance(item, dict):
                payloads[replica] = {name: array.copy() for name, array in item.items()}
        received = [Received(replica, 1, BATCH, payload) for replica, payload in sorted(payloads.items(), reverse=True)]
        rules = Rules(self.layout, fragment, self.job.outer_optimizer, self.job.sync, Fp32())
        new = reduce(number, self.theta[fragment], self._momentum[fragment], received, rules)
        self.theta[fragment], self._momentum[fragment], verdict = new
        assert len(verdict.accepted) == REPLICAS


class Group:
    """Sums tensors of the replicas' threads in the order of their ranks."""

    def __init__(self) -> None:
        self._barrier, self._given = Barrier(REPLICAS, timeout=60), dict[int, torch.Tensor]()

    def average(self, rank: int, tensor: torch.Tensor) -> None:
        self._given[rank] = tensor.clone()
        self._barrier.wait()
        total = self._given[0].clone()
        for other in range(1, REPLICAS):
            total += self._given[other]
        self._barrier.wait()
        tensor.copy_(total / REPLICAS)


class Manager:
    """What torchft's DiLoCo asks of its manager, for replicas that are threads and never fail."""

    _use_async_quorum = False

    def __init__(self, rank: int, group: Group) -> None:
        self._rank, self._group, self._step = rank, group, 0

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> mock.Mock:
        self._group.average(self._rank, tensor)
        return mock.Mock()

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def current_step(self) -> int:
        return self._step

    def start_quorum(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None: ...


def peers(job: Job) -> list[Any]:
    """The same training by torchft; its models and its `DiLoCo`, for each replica."""
    group, made = Group(), dict[int, Any]()
    steppers = [Stepper(job) for _ in range(REPLICAS)]  # One after the other: initial weights are random.

    def train(rank: int) -> None:
        stepper, feeder = steppers[rank], Feeder(0)
        feeder.put(rank, samples_of(rank))
        names = {entry.name: entry.fragment for entry in layout_of(stepper.model, FRAGMENTS).entries}
        parts = [torch.nn.Module() for _ in range(FRAGMENTS)]
        for name, parameter in stepper.model.named_parameters():
            parts[names[name]].register_parameter(name.replace(".", "/"), parameter)
        config = job.inner_optimizer
        options = {"betas": config.betas, "eps": config.epsilon, "weight_decay": 0.0, "fused": True}
        inner = torch.optim.AdamW(stepper.model.parameters(), config.learning_rate, **options)
        outer = [torch.optim.SGD(part.parameters(), 0.7, momentum=0.9, nesterov=True) for part in parts]
        delays = {"fragment_sync_delay": job.sync.delay_steps, "fragment_update_alpha": job.sync.mixing}
        arguments = Manager(rank, group), parts, inner, outer, FRAGMENTS * WINDOW
        with local_sgd.DiLoCo(*arguments, **delays) as diloco:
            for step in range(STEPS):
                inner.zero_grad()
                stepper.backward(feeder.batch(steps(rank, 0, STEPS), step * BATCH, BATCH))
                inner.step()
        made[rank] = stepper.model, diloco

    threads = [Thread(target=train, args=(rank,)) for rank in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [made[rank] for rank in range(REPLICAS)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
@pytest.mark.parametrize("delay", [0, 2, 5])
def test_sixty_steps_of_three_replicas_agree_with_torchft_to_the_bit(delay: int, mixing: float) -> None:
    job = job_of(delay, mixing)
    ours = Fleet(job)
    ours.run()
    for loop, (theirs, diloco) in zip(ours.loops, peers(job), strict=True):
        own = dict(loop._model.named_parameters())
        for entry in ours.layout.entries:
            there = diloco._fragments[entry.fragment].original_parameters[entry.name.replace(".", "/")]
            flat = ours.theta[entry.fragment][entry.group][entry.offset : entry.offset + entry.size]
            assert np.array_equal(flat, there.numpy().ravel()), f"global {entry.name}"
            assert torch.equal(own[entry.name], theirs.get_parameter(entry.name)), f"local {entry.name}"
    assert mixing == 0 or not torch.equal(*(loop._model.lm_head.weight for loop in ours.loops[:2]))
