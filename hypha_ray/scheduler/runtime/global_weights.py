"""Global weights and outer momentum as object references, which the scheduler passes on and never reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.scheduler.messages import Initialised, Persist, Reduce
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.supervised_actor import GONE
from hypha_ray.server.actor import StepRequest
from hypha_ray.types import FragmentUpdate, Layout, Rejection, Saved, Source, Verdict, WeightsVersion

__all__ = ["LOST", "GlobalWeights"]


class GlobalWeights:
    """θ and momentum of a run, one object in the store for each fragment and round; and workers' inner states."""

    def __init__(self, job: Job, actors: RunActors) -> None:
        self._job = job
        self._actors = actors
        self._theta: list[Any] = []
        self._momentum: list[asyncio.Future[Any]] = []
        """Momentum of each fragment, which a server returns after θ, because workers wait for θ."""
        self._differences: dict[int, Any] = {}
        """Difference of θ to its value before the last step, by fragment, if new weights are sent like that."""
        self._made: dict[int, tuple[Any, asyncio.Future[Any], Any]] = {}
        """θ, momentum and difference of a step that isn't reported to the core yet, by fragment."""
        self.inner: dict[int, Any] = {}
        """Inner states after the last committed round, by worker; in replay mode."""
        self._saving = asyncio.Lock()
        self._described = asyncio.Event()
        self.bytes: int | None = None
        """Size of θ in bytes, once it is known."""

    async def initialise(self, resumed: bool, layout: Layout | None = None) -> Initialised:
        """Get the saved weights from the store, or let the server build the model if its layout isn't known."""
        fragments = self._job.sync.fragments
        self.layout = await self._built() if layout is None else layout
        self._described.set()
        if resumed:
            await self._recall()
        else:
            self._momentum = [asyncio.ensure_future(self._still(fragment)) for fragment in range(fragments)]
            await asyncio.gather(*self._momentum)
        begin = await self._actors.store.ask(lambda store: store.begin.remote(self.layout, *self._theta))
        self.bytes = self.layout.bytes()
        part_bytes = tuple(self.layout.bytes(fragment) for fragment in range(fragments))
        return Initialised(self.bytes, await begin, self.layout.sha256(), part_bytes)

    async def described(self) -> Layout:
        """Return the layout of the model; wait until it is known."""
        await self._described.wait()
        return self.layout

    async def prepare(self) -> None:
        """Start the parameter servers before the first delta comes."""
        await asyncio.gather(*(server.ask(lambda actor: actor.ping.remote()) for server in self._actors.servers))

    async def _built(self) -> Layout:
        """Layout and initial weights of the model, which the server builds."""
        returns = 1 + self._job.sync.fragments
        *self._theta, built = await self._actors.servers[0].ask(
            lambda server: server.initial.options(num_returns=returns).remote()
        )
        layout: Layout = await built
        return layout

    async def _recall(self) -> None:
        """Take weights, momentum and inner states from the snapshot from which the store resumes."""
        fragments = self._job.sync.fragments
        workers = await (await self._actors.store.ask(lambda store: store.inner.remote()))
        count = 2 * fragments + len(workers) + 1
        refs = await self._actors.store.ask(lambda s: s.recall.options(num_returns=count).remote(self.layout))
        self._theta = list(refs[:fragments])
        self._momentum = [asyncio.ensure_future(_known(ref)) for ref in refs[fragments : 2 * fragments]]
        self.inner = dict(zip(workers, refs[2 * fragments : -1], strict=True))

    async def _still(self, fragment: int) -> Any:
        """Return a reference to a fragment's momentum before the first round."""
        server = self._actors.servers[fragment]
        return (await server.ask(lambda actor: _unread(actor, actor.momentum.remote(self.layout, fragment))))[0]

    def orders(self, to: Source, version: WeightsVersion, whole: bool) -> list[Callable[[Any], Any]]:
        """Calls that give a worker the newest θ: one object for each fragment, however many readers.

        Args:
            to: the worker.
            version: version of these weights.
            whole: whether the worker is sent all fragments; otherwise those that changed since the version before.

        """
        fragments = range(len(self._theta)) if whole else fragments_of_round(self._job, version - 1)
        orders: list[Callable[[Any], Any]] = []
        for fragment in fragments:
            difference = not whole and fragment in self._differences
            ref = self._differences[fragment] if difference else self._theta[fragment]
            orders.append(
                partial(_merged, to, FragmentUpdate(version, fragment, len(fragments), whole, difference), ref)
            )
        return orders

    async def reduce(self, command: Reduce, payloads: list[list[Any]]) -> Verdict:
        """One outer step of the round's fragments. A delta that one of them rejects is left out of all."""
        rejected: dict[int, Rejection] = {}
        fragments = fragments_of_round(self._job, command.round)
        while True:
            kept = [
                (source, weight, refs)
                for source, weight, refs in zip(command.sources, command.weights, payloads, strict=True)
                if source.worker not in rejected
            ]
            try:
                calls = await asyncio.gather(*(self._call(n, f, command, kept) for n, f in enumerate(fragments)))
                steps = await asyncio.gather(*(self._step(*call) for call in calls))
            except GONE:
                lost = await self._lost(command.round, kept)
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
            for fragment, call, step in zip(fragments, calls, steps, strict=True):
                self._made[fragment] = step[0], asyncio.ensure_future(self._after(*call)), step[1]
        return _joined(verdicts, tuple(rejected[worker] for worker in sorted(rejected)))

    def advance(self) -> None:
        """Make the last reduction's result the newest weights, to be sent and saved from now on."""
        for fragment, (theta, momentum, difference) in self._made.items():
            self._theta[fragment], self._momentum[fragment] = theta, momentum
            if self._job.sync.downward_codec != "fp32":
                self._differences[fragment] = difference
        self._made.clear()

    async def _call(self, place: int, fragment: int, command: Reduce, kept: list[Any]) -> tuple[StepRequest, list[Any]]:
        """Request of a step, and references to θ, momentum and payloads; `place` is the payload's index in a delta."""
        senders = tuple((source.worker, source.incarnation, weight) for source, weight, _ in kept)
        request = StepRequest(uuid4().hex, self.layout, fragment, command.round, senders, command.phase)
        return request, [self._theta[fragment], await self._momentum[fragment], *(refs[place] for _, _, refs in kept)]

    async def _step(self, request: StepRequest, refs: list[Any]) -> list[Any]:
        """Refs of new θ, of its difference, and of the verdict."""
        server = self._actors.servers[request.fragment]
        return list(await server.ask(lambda server: server.reduce.remote(request, *refs)))

    async def _after(self, request: StepRequest, refs: list[Any]) -> Any:
        """Wait for the momentum after a step, and return a reference to it."""
        server = self._actors.servers[request.fragment]
        return (await server.ask(lambda server: server.momentum_after.remote(request, *refs)))[0]

    async def _lost(self, round_number: int, kept: list[Any]) -> dict[int, Rejection]:
        """Return rejections of workers whose payloads were lost with their nodes."""
        found: dict[int, Rejection] = {}
        for source, _, refs in kept:
            try:
                await self.fetch(round_number, refs)
            except GONE:
                found[source.worker] = Rejection(source.worker, LOST, blamed=False)
        return found

    async def fetch(self, round_number: int, payloads: list[Any]) -> None:
        """Bring payloads to their servers' nodes before the round ends, where they survive the end of their own nodes.

        Args:
            round_number: round of the payloads.
            payloads: one for each fragment; after them the inner state, if there is one, for the store's node.

        Raises:
            ObjectLostError: a payload was lost with its node.
            RayActorError: likewise, before its worker had ended its stream.

        """
        takers = [
            *(self._actors.servers[fragment] for fragment in fragments_of_round(self._job, round_number)),
            self._actors.store,
        ]
        for taker, ref in zip(takers, payloads, strict=False):
            await taker.ask(partial(_received, ref=ref))

    def persist(self, command: Persist) -> Awaitable[Saved]:
        """Let the store write snapshot and commit record of the newest weights, after those of earlier rounds."""
        workers = tuple(sorted(self.inner))
        inner = [self.inner[worker] for worker in workers]
        return self._persist(command, workers, [*self._theta], [*self._momentum], inner)

    async def _persist(
        self, command: Persist, workers: tuple[int, ...], theta: list[Any], momentum: list[Any], inner: list[Any]
    ) -> Saved:
        async with self._saving:  # In order, also if the store dies and is asked again.
            flats = [*theta, *await asyncio.gather(*momentum), *inner]
            call = self._actors.store.ask(lambda store: store.commit.remote(command, self.layout, workers, *flats))
            saved: Saved = await (await call)
            return saved


def _merged(to: Source, piece: FragmentUpdate, ref: Any, worker: Any) -> Any:
    return worker.merge.remote(to, piece, ref)


def _received(taker: Any, ref: Any) -> Any:
    return taker.receive.remote(ref)


def _unread(server: Any, ref: Any) -> list[Any]:
    """References to a server's result, and to a receipt that exists once the result does; `ask` reads the receipt."""
    return [ref, server.receive.remote(ref)]


async def _known(ref: Any) -> Any:
    """A known reference as an awaitable."""
    return ref


def _joined(verdicts: list[Verdict], rejected: tuple[Rejection, ...]) -> Verdict:
    """Join the verdicts of all fragments; squares of norms add up."""
    accepted = tuple(
        replace(parts[0], norm=sum(part.norm**2 for part in parts) ** 0.5)
        for parts in zip(*(verdict.accepted for verdict in verdicts), strict=True)
    )
    update_norm = sum(verdict.update_norm**2 for verdict in verdicts) ** 0.5
    return Verdict(verdicts[0].round, accepted, rejected, update_norm, sum(one.coded_bytes for one in verdicts))
