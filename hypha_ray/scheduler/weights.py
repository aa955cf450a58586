"""Global weights and outer momentum as refs: made, reduced, sent and persisted, never read by the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from ray.exceptions import ObjectLostError

from hypha_ray.codec import codec
from hypha_ray.config import Job
from hypha_ray.scheduler.commands import Initialised, Persist, Reduce
from hypha_ray.scheduler.crew import Crew
from hypha_ray.types import Layout, Rejection, Saved, Source, Verdict

LOST = "its payload was lost with its node"


class Weights:
    """θ and momentum of a run, one object in the store for each fragment and round; and workers' inner states."""

    def __init__(self, job: Job, crew: Crew) -> None:
        self._job, self._crew = job, crew
        self._theta: list[Any] = []
        self._momentum: list[Any] = []
        self._differences: list[Any] = []
        """Of θ to that of the round before, by fragment, if the job has new weights sent like that."""
        self.inner: dict[int, Any] = {}
        """Inner states after the last committed round, by worker; in replay mode."""
        self._saving, self._described = asyncio.Lock(), asyncio.Event()
        self.bytes: int | None = None
        """Size of θ, once it is known."""

    async def initialise(self, resumed: bool, layout: Layout | None = None) -> Initialised:
        """Have the store bring back what was saved, and the server build the model if its layout isn't known."""
        fragments = self._job.sync.fragments
        self.layout = await self._built() if layout is None else layout
        self._described.set()
        if resumed:
            await self._recall()
        else:
            self._momentum = list(await asyncio.gather(*(self._still(f) for f in range(fragments))))
        begin = await self._crew.store.ask(lambda store: store.begin.remote(self.layout, *self._theta))
        self.bytes = self.layout.bytes()
        form = codec(self._job.sync.downward_codec).form
        parts = [part for fragment in range(fragments) for part in form(self.layout.groups(fragment)).values()]
        difference_bytes = sum(np.dtype(dtype).itemsize * size for dtype, size in parts)
        return Initialised(self.bytes, await begin, self.layout.sha256(), difference_bytes)

    async def described(self) -> Layout:
        """Where the model's tensors lie; waits until that is known."""
        await self._described.wait()
        return self.layout

    async def prepare(self) -> None:
        """See that there are servers before the first delta comes."""
        await asyncio.gather(*(server.ask(lambda actor: actor.ping.remote()) for server in self._crew.servers))

    async def _built(self) -> Layout:
        """Layout and initial weights of the model, which the server builds."""
        returns = 1 + self._job.sync.fragments
        *self._theta, built = await self._crew.servers[0].ask(
            lambda server: _turned(server.initial.options(num_returns=returns).remote())
        )
        layout: Layout = await built
        return layout

    async def _recall(self) -> None:
        """Take weights, momentum and inner states from the snapshot that the store goes on from."""
        fragments = self._job.sync.fragments
        workers = await (await self._crew.store.ask(lambda store: store.inner.remote()))
        count = 2 * fragments + len(workers) + 1
        refs = await self._crew.store.ask(lambda s: s.recall.options(num_returns=count).remote(self.layout))
        self._theta, self._momentum = list(refs[:fragments]), list(refs[fragments : 2 * fragments])
        self.inner = dict(zip(workers, refs[2 * fragments : -1], strict=True))

    async def _still(self, fragment: int) -> Any:
        """Ref of a fragment's momentum before the first round."""
        server = self._crew.servers[fragment]
        return await server.ask(lambda actor: actor.momentum.remote(self.layout, fragment))

    def orders(self, to: Source, round_number: int, whole: bool) -> list[Callable[[Any], Any]]:
        """Calls that give a worker the newest θ: one object for each fragment, however many readers.

        Args:
            to: the worker.
            round_number: the round that begins with these weights.
            whole: the worker doesn't have the weights of the round before.

        """
        whole = whole or not self._differences
        refs = self._theta if whole else self._differences
        return [partial(_merged, to, round_number, fragment, ref, not whole) for fragment, ref in enumerate(refs)]

    async def reduce(self, command: Reduce, payloads: list[list[Any]]) -> Verdict:
        """One outer step of all fragments. A delta that one fragment rejects is left out of all of them."""
        rejected: dict[int, Rejection] = {}
        while True:
            kept = [
                (source, samples, refs)
                for source, samples, refs in zip(command.sources, command.samples, payloads, strict=True)
                if source.worker not in rejected
            ]
            try:
                steps = await asyncio.gather(*(self._step(f, command.round, kept) for f in range(len(self._theta))))
            except ObjectLostError:
                lost = await self._lost(kept)
                if not lost:
                    raise  # It is θ: the run has to go on from its last snapshot.
                rejected |= lost
                continue
            verdicts = [await step[-1] for step in steps]
            new = {rejection.worker: rejection for verdict in verdicts for rejection in verdict.rejected}
            alike = all(len(verdict.rejected) == len(new) for verdict in verdicts)
            rejected |= new
            if alike or not kept:
                break
        if verdicts[0].accepted:
            self._theta, self._momentum = [step[0] for step in steps], [step[1] for step in steps]
            self._differences = [] if self._job.sync.downward_codec == "fp32" else [step[2] for step in steps]
        return _joined(verdicts, tuple(rejected[worker] for worker in sorted(rejected)))

    async def _step(self, fragment: int, round_number: int, kept: list[Any]) -> list[Any]:
        meta = tuple((source.worker, source.incarnation, samples) for source, samples, _ in kept)
        state = self._theta[fragment], self._momentum[fragment]
        refs = [payloads[fragment] for _, _, payloads in kept]
        server = self._crew.servers[fragment]
        return list(
            await server.ask(lambda s: s.reduce.remote(self.layout, fragment, round_number, *state, meta, *refs))
        )

    async def _lost(self, kept: list[Any]) -> dict[int, Rejection]:
        """Workers whose payloads went with their nodes before the server had them."""
        found: dict[int, Rejection] = {}
        for source, _, refs in kept:
            try:
                await self.fetch(refs)
            except ObjectLostError:
                found[source.worker] = Rejection(source.worker, LOST)
        return found

    async def fetch(self, payloads: list[Any]) -> None:
        """Bring payloads to their servers' nodes: ahead of the round's end, and safe from their own nodes' end.

        Raises:
            ObjectLostError: one went with its node before.

        """
        for server, ref in zip(self._crew.servers, payloads, strict=True):
            await server.ask(partial(_received, ref=ref))

    def persist(self, command: Persist) -> Awaitable[Saved]:
        """Let the store write snapshot and commit record of the weights that there are now, after those before."""
        workers = tuple(sorted(self.inner))
        flats = [*self._theta, *self._momentum, *(self.inner[worker] for worker in workers)]
        return self._persist(lambda store: store.commit.remote(command, self.layout, workers, *flats))

    async def _persist(self, call: Callable[[Any], Any]) -> Saved:
        async with self._saving:  # In order, also if the store dies and is asked again.
            saved: Saved = await (await self._crew.store.ask(call))
            return saved


def _merged(to: Source, round_number: int, fragment: int, ref: Any, difference: bool, worker: Any) -> Any:
    return worker.merge.remote(to, round_number, fragment, ref, difference)


def _received(server: Any, ref: Any) -> Any:
    return server.receive.remote(ref)


def _turned(refs: list[Any]) -> list[Any]:
    """The same refs with the small one last, which is the one that `Post.ask` reads."""
    return [*refs[1:], refs[0]]


def _joined(verdicts: list[Verdict], rejected: tuple[Rejection, ...]) -> Verdict:
    """One verdict of those of the fragments: norms add up in squares."""
    accepted = tuple(
        replace(parts[0], norm=sum(part.norm**2 for part in parts) ** 0.5)
        for parts in zip(*(verdict.accepted for verdict in verdicts), strict=True)
    )
    update_norm = sum(verdict.update_norm**2 for verdict in verdicts) ** 0.5
    return Verdict(verdicts[0].round, accepted, rejected, update_norm)
