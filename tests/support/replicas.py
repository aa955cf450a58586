"""Three inner loops that stream fragments, and in the place of scheduler and servers just what the algorithm says."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from hypha_ray.codec import Fp32
from hypha_ray.config import Job
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, initial_momentum, reduce
from hypha_ray.types import Flat, FragmentUpdate, Layout, Plan, Source, Span
from hypha_ray.types.events import HandOver
from hypha_ray.worker.incarnation import BatchSource, Inbox
from hypha_ray.worker.loop import TrainingLoop
from tests.support.worker_bench import CONFIG

REPLICAS, STEPS, WINDOW, BATCH = 3, 60, 10, 4
ROUNDS = STEPS // WINDOW
MODEL = {**CONFIG, "n_layer": 2}


def job_of(fragments: int, delay: int, mixing: float, **sync: Any) -> Job:
    mix = {"fragments": fragments, "delay_steps": delay, "mixing": mixing, "weighting": "uniform", **sync}
    tables: dict[str, Any] = {
        "model": {"config": MODEL},
        "rounds": {"update_rounds": 1000, "max_batch_size": BATCH},
        "inner_optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0, "clip_norm": None},
        "outer_optimizer": {"learning_rate": 0.7, "momentum": 0.9},
        "sync": mix,
        "resources": {"num_workers": REPLICAS},
        "worker": {"device": "cpu"},
    }
    return Job.model_validate(tables)


def samples_of(replica: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(replica).integers(0, 50, (STEPS * BATCH, 16)).astype(np.int32)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def steps(replica: int, first: int, last: int) -> tuple[Span, ...]:
    return (Span(0, replica, first * BATCH, last * BATCH),) if first < last else ()


def outer_step(job: Job, layout: Layout, number: int, theta: Flat, momentum: Flat, payloads: dict[int, Flat]) -> Any:
    """New weights and momentum of the fragment whose turn it is."""
    (fragment,) = fragments_of_round(job, number)
    received = [Received(replica, 1, BATCH, payload) for replica, payload in sorted(payloads.items(), reverse=True)]
    rules = ReduceSpec(layout, fragment, job.outer_optimizer, job.sync, Fp32())
    *new, verdict = reduce(number, theta, momentum, received, rules)
    assert len(verdict.accepted) == REPLICAS
    return new


class Fleet:
    """Three inner loops, and in the place of scheduler and servers just what the algorithm says.

    Args:
        job: with the number of fragments, and how their results come.
        window: steps of a round.

    """

    def __init__(self, job: Job, window: int = WINDOW) -> None:
        self.job, self.said = job, SimpleQueue[tuple[int, Any]]()
        self._window = window
        model = build_model(job.model, 0)
        self._parts = range(job.sync.fragments)
        self.layout = layout_of(model, job.sync.fragments)
        self.theta = [gather(model, self.layout, fragment) for fragment in self._parts]
        self._momentum = [initial_momentum(self.layout, fragment) for fragment in self._parts]
        self._desks = [Inbox() for _ in range(REPLICAS)]
        self.loops = [self._loop(replica, inbox) for replica, inbox in enumerate(self._desks)]

    def _loop(self, replica: int, inbox: Inbox) -> TrainingLoop:
        batch_source = BatchSource(0)
        batch_source.put(replica, samples_of(replica))
        return TrainingLoop(
            self.job, Source("run", replica, 1), batch_source, inbox, lambda item: self.said.put((replica, item))
        )

    def run(self) -> None:
        threads = [Thread(target=loop.run, daemon=True) for loop in self.loops]
        for thread in threads:
            thread.start()
        self._send(0, self._parts, whole=True)
        delay = self.job.sync.delay_steps
        for number in range(ROUNDS):
            first, last = max(0, number * self._window - delay), (number + 1) * self._window - delay
            for replica, inbox in enumerate(self._desks):
                ahead = steps(replica, last, last + delay)
                inbox.assign(Plan(number, 0, steps(replica, first, last), BATCH, ahead=ahead))
            self._reduce(number)
            self._send(number + 1, fragments_of_round(self.job, number), whole=False)
        for inbox in self._desks:
            inbox.assign(Plan(ROUNDS, 0, (), BATCH, final=True))
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _send(self, number: int, fragments: Any, whole: bool) -> None:
        for inbox in self._desks:
            for fragment in fragments:
                inbox.merge(FragmentUpdate(number, fragment, len(fragments), whole), self.theta[fragment])

    def _reduce(self, number: int) -> None:
        (fragment,) = fragments_of_round(self.job, number)
        payloads: dict[int, Flat] = {}
        while len(payloads) < REPLICAS:
            replica, item = self.said.get(timeout=60)
            if isinstance(item, HandOver):
                assert (item.delta.round, item.delta.fragments) == (number, 1)
                payloads[replica] = {name: array.copy() for name, array in item.parts[0].items()}
        state = self.theta[fragment], self._momentum[fragment]
        self.theta[fragment], self._momentum[fragment] = outer_step(self.job, self.layout, number, *state, payloads)
