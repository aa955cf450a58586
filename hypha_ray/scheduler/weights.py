"""Global weights and outer momentum as refs: made, reduced, sent and persisted, never read by the scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler.commands import Persist, Reduce
from hypha_ray.scheduler.crew import Crew
from hypha_ray.types import Layout, Rejection, Verdict


class Weights:
    """θ and momentum of a run, one object in the store for each fragment and round."""

    def __init__(self, job: Job, crew: Crew) -> None:
        self._job, self._crew = job, crew
        self._theta: list[Any] = []
        self._momentum: list[Any] = []
        self.bytes: int | None = None
        """Size of θ, once it is known."""

    async def initialise(self) -> None:
        """Have the server build the model."""
        fragments = self._job.sync.fragments
        first, *self._theta = self._crew.servers[0].initial.options(num_returns=1 + fragments).remote()
        self.layout: Layout = await first
        self._momentum = [server.momentum.remote(self.layout, f) for f, server in enumerate(self._crew.servers)]
        await self._crew.store.begin.remote(self.layout, *self._theta)
        self.bytes = self.layout.bytes()

    def send(self, worker: int, round_number: int) -> None:
        """Give a worker the newest θ: one object, however many readers."""
        for fragment, theta in enumerate(self._theta):
            self._crew.workers[worker].merge.remote(round_number, fragment, theta)

    async def reduce(self, command: Reduce, payloads: list[list[Any]]) -> Verdict:
        """One outer step of all fragments. A delta that one fragment rejects is left out of all of them."""
        rejected: dict[int, Rejection] = {}
        while True:
            kept = [
                (source, samples, refs)
                for source, samples, refs in zip(command.sources, command.samples, payloads, strict=True)
                if source.worker not in rejected
            ]
            steps = [self._step(fragment, command.round, kept) for fragment in range(len(self._theta))]
            verdicts = await asyncio.gather(*(step[2] for step in steps))
            new = {rejection.worker: rejection for verdict in verdicts for rejection in verdict.rejected}
            alike = all(len(verdict.rejected) == len(new) for verdict in verdicts)
            rejected |= new
            if alike or not kept:
                break
        if verdicts[0].accepted:
            self._theta, self._momentum = [step[0] for step in steps], [step[1] for step in steps]
        return _joined(verdicts, tuple(rejected[worker] for worker in sorted(rejected)))

    def _step(self, fragment: int, round_number: int, kept: list[Any]) -> list[Any]:
        meta = tuple((source.worker, source.incarnation, samples) for source, samples, _ in kept)
        theta, momentum = self._theta[fragment], self._momentum[fragment]
        refs = [payloads[fragment] for _, _, payloads in kept]
        reduce = self._crew.servers[fragment].reduce
        return list(reduce.remote(self.layout, fragment, round_number, theta, momentum, meta, *refs))

    def persist(self, command: Persist) -> Any:
        """Let the store write snapshot and commit record, one round after the other; returns a ref to the `Commit`."""
        return self._crew.store.commit.remote(command, self.layout, *self._theta, *self._momentum)


def _joined(verdicts: list[Verdict], rejected: tuple[Rejection, ...]) -> Verdict:
    """One verdict of those of the fragments: norms add up in squares."""
    accepted = tuple(
        replace(parts[0], norm=sum(part.norm**2 for part in parts) ** 0.5)
        for parts in zip(*(verdict.accepted for verdict in verdicts), strict=True)
    )
    update_norm = sum(verdict.update_norm**2 for verdict in verdicts) ** 0.5
    return Verdict(verdicts[0].round, accepted, rejected, update_norm)
