"""Global weights and outer momentum as object references, which the scheduler passes on and never reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
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
from hypha_ray.types import Contribution, FragmentUpdate, Layout, Rejection, Saved, Source, Verdict, WeightsVersion

__all__ = ["LOST", "GlobalWeights"]


@dataclass(frozen=True, slots=True)
class _Payloads:
    """A delta in a reduction."""

    source: Source
    weight: int
    refs: list[Any]
    """Reference to the payload of each fragment."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Result of a fragment's outer step."""

    theta: Any
    momentum: asyncio.Future[Any]
    difference: Any


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
        self._steps: dict[int, _Step] = {}
        """Results by fragment of an outer step that isn't reported to the core yet."""
        self.inner: dict[int, Any] = {}
        """Inner states after the last committed round, by worker; in replay mode."""
        self._save_lock = asyncio.Lock()
        self._described = asyncio.Event()
        self.bytes: int | None = None
        """Size of θ in bytes, once it is known."""

    async def initialise(self, resumed: bool, layout: Layout | None = None) -> Initialised:
        """Get the saved weights from the store, or let the server build the model if its layout isn't known."""
        fragments = range(self._job.sync.fragments)
        self.layout = await self._build() if layout is None else layout
        self._described.set()
        if resumed:
            await self._recall()
        else:
            self._momentum = [asyncio.ensure_future(self._initial_momentum(fragment)) for fragment in fragments]
            await asyncio.gather(*self._momentum)
        theta_sha256 = await self._actors.store.ask(lambda store: store.begin.remote(self.layout, *self._theta))
        self.bytes = self.layout.bytes()
        part_bytes = tuple(self.layout.bytes(fragment) for fragment in fragments)
        return Initialised(self.bytes, await theta_sha256, self.layout.sha256(), part_bytes)

    async def described(self) -> Layout:
        """Return the layout of the model; wait until it is known."""
        await self._described.wait()
        return self.layout

    async def prepare(self) -> None:
        """Start the parameter servers before the first delta comes."""
        pings = [server.ask(lambda actor: actor.ping.remote()) for server in self._actors.servers]
        await asyncio.gather(*pings)

    async def _build(self) -> Layout:
        """Layout and initial weights of the model, which the server builds."""
        returns = self._job.sync.fragments + 1

        def initial(server: Any) -> Any:
            return server.initial.options(num_returns=returns).remote()

        *self._theta, layout_ref = await self._actors.servers[0].ask(initial)
        layout: Layout = await layout_ref
        return layout

    async def _recall(self) -> None:
        """Take weights, momentum and inner states from the snapshot from which the store resumes."""
        fragments = self._job.sync.fragments
        workers = await (await self._actors.store.ask(lambda store: store.inner.remote()))
        returns = 2 * fragments + len(workers) + 1

        def recall(store: Any) -> Any:
            return store.recall.options(num_returns=returns).remote(self.layout)

        *refs, _ = await self._actors.store.ask(recall)
        theta = refs[:fragments]
        momentum = refs[fragments : 2 * fragments]
        inner = refs[2 * fragments :]
        self._theta = theta
        self._momentum = [asyncio.ensure_future(_known(ref)) for ref in momentum]
        self.inner = dict(zip(workers, inner, strict=True))

    async def _initial_momentum(self, fragment: int) -> Any:
        """Return a reference to a fragment's momentum before the first round."""

        def momentum_and_receipt(server: Any) -> list[Any]:
            momentum = server.momentum.remote(self.layout, fragment)
            return [momentum, server.receive.remote(momentum)]  # `ask` reads the receipt, not the momentum.

        momentum, _ = await self._actors.servers[fragment].ask(momentum_and_receipt)
        return momentum

    def orders(self, to: Source, version: WeightsVersion, sends_all: bool) -> list[Callable[[Any], Any]]:
        """Calls that give a worker the newest θ: one object for each fragment, however many readers.

        Args:
            to: the worker.
            version: version of these weights.
            sends_all: whether the worker is sent all fragments; otherwise those that changed since the version before.

        """
        fragments = range(len(self._theta)) if sends_all else fragments_of_round(self._job, version - 1)
        orders: list[Callable[[Any], Any]] = []
        for fragment in fragments:
            is_difference = not sends_all and fragment in self._differences
            ref = self._differences[fragment] if is_difference else self._theta[fragment]
            update = FragmentUpdate(version, fragment, len(fragments), sends_all, is_difference)
            orders.append(partial(_merge, to, update, ref))
        return orders

    async def reduce(self, command: Reduce, payloads: list[list[Any]]) -> Verdict:
        """One outer step of the round's fragments. A delta that one of them rejects is left out of all."""
        rejected: dict[int, Rejection] = {}
        fragments = fragments_of_round(self._job, command.round)
        while True:
            deltas: list[_Payloads] = []
            for source, weight, refs in zip(command.sources, command.weights, payloads, strict=True):
                if source.worker not in rejected:
                    deltas.append(_Payloads(source, weight, refs))
            try:
                calls = await self._calls(command, deltas)
                steps = await asyncio.gather(*(self._step(*call) for call in calls))
            except GONE:
                lost_payloads = await self._lost_payloads(command.round, deltas)
                if not lost_payloads:
                    raise  # θ is lost: the run has to go on from its last snapshot.
                rejected |= lost_payloads
                continue
            verdicts = [await verdict for _, _, verdict in steps]
            newly_rejected: dict[int, Rejection] = {}
            for verdict in verdicts:
                for rejection in verdict.rejected:
                    newly_rejected[rejection.worker] = rejection
            rejected |= newly_rejected
            all_agree = all(len(verdict.rejected) == len(newly_rejected) for verdict in verdicts)
            if all_agree or not deltas:
                break
        if verdicts[0].accepted:
            for fragment, call, (theta, difference, _) in zip(fragments, calls, steps, strict=True):
                momentum = asyncio.ensure_future(self._momentum_after(*call))
                self._steps[fragment] = _Step(theta, momentum, difference)
        return _join_verdicts(verdicts, tuple(rejected[worker] for worker in sorted(rejected)))

    def advance(self) -> None:
        """Make the last reduction's result the newest weights, to be sent and saved from now on."""
        for fragment, step in self._steps.items():
            self._theta[fragment] = step.theta
            self._momentum[fragment] = step.momentum
            if self._job.sync.downward_codec != "fp32":
                self._differences[fragment] = step.difference
        self._steps.clear()

    async def _calls(self, command: Reduce, deltas: list[_Payloads]) -> list[tuple[StepRequest, list[Any]]]:
        """Request of a step of each fragment, with references to θ, momentum and payloads."""
        senders = tuple((delta.source.worker, delta.source.incarnation, delta.weight) for delta in deltas)
        calls: list[tuple[StepRequest, list[Any]]] = []
        for index, fragment in enumerate(fragments_of_round(self._job, command.round)):
            request = StepRequest(uuid4().hex, self.layout, fragment, command.round, senders, command.phase)
            refs = [self._theta[fragment], await self._momentum[fragment]]
            for delta in deltas:
                refs.append(delta.refs[index])
            calls.append((request, refs))
        return calls

    async def _step(self, request: StepRequest, refs: list[Any]) -> list[Any]:
        """References to the new θ, its difference, and the verdict."""
        server = self._actors.servers[request.fragment]
        return list(await server.ask(lambda server: server.reduce.remote(request, *refs)))

    async def _momentum_after(self, request: StepRequest, refs: list[Any]) -> Any:
        """Wait for the momentum after a step, and return a reference to it."""
        server = self._actors.servers[request.fragment]
        momentum, *_ = await server.ask(lambda server: server.momentum_after.remote(request, *refs))
        return momentum

    async def _lost_payloads(self, round_number: int, deltas: list[_Payloads]) -> dict[int, Rejection]:
        """Return rejections of workers whose payloads were lost with their nodes."""
        rejected: dict[int, Rejection] = {}
        for delta in deltas:
            worker = delta.source.worker
            try:
                await self.fetch(round_number, delta.refs)
            except GONE:
                rejected[worker] = Rejection(worker, LOST, blamed=False)
        return rejected

    async def fetch(self, round_number: int, payloads: list[Any]) -> None:
        """Bring payloads to their servers' nodes before the round ends, where they survive the end of their own nodes.

        Args:
            round_number: round of the payloads.
            payloads: one for each fragment; after them the inner state, if there is one, for the store's node.

        Raises:
            ObjectLostError: a payload was lost with its node.
            RayActorError: likewise, before its worker had ended its stream.

        """
        fragments = fragments_of_round(self._job, round_number)
        receivers = [self._actors.servers[fragment] for fragment in fragments]
        receivers.append(self._actors.store)
        for receiver, ref in zip(receivers, payloads, strict=False):
            await receiver.ask(partial(_receive, ref=ref))

    def persist(self, command: Persist) -> Awaitable[Saved]:
        """Let the store write snapshot and commit record of the newest weights, after those of earlier rounds."""
        workers = tuple(sorted(self.inner))
        inner = [self.inner[worker] for worker in workers]
        return self._persist(command, workers, [*self._theta], [*self._momentum], inner)

    async def _persist(
        self, command: Persist, workers: tuple[int, ...], theta: list[Any], momentum: list[Any], inner: list[Any]
    ) -> Saved:
        async with self._save_lock:  # In order, also if the store dies and is asked again.
            momentum_refs = await asyncio.gather(*momentum)
            flats = [*theta, *momentum_refs, *inner]
            call = self._actors.store.ask(lambda store: store.commit.remote(command, self.layout, workers, *flats))
            saved: Saved = await (await call)
            return saved


def _merge(to: Source, update: FragmentUpdate, ref: Any, worker: Any) -> Any:
    return worker.merge.remote(to, update, ref)


def _receive(receiver: Any, ref: Any) -> Any:
    return receiver.receive.remote(ref)


async def _known(ref: Any) -> Any:
    """A known reference as an awaitable."""
    return ref


def _join_verdicts(verdicts: list[Verdict], rejected: tuple[Rejection, ...]) -> Verdict:
    """Join the verdicts of all fragments; squares of norms add up."""
    contributions: list[Contribution] = []
    for parts in zip(*(verdict.accepted for verdict in verdicts), strict=True):
        squares = sum(part.norm**2 for part in parts)
        contributions.append(replace(parts[0], norm=squares**0.5))
    update_squares = sum(verdict.update_norm**2 for verdict in verdicts)
    coded_bytes = sum(verdict.coded_bytes for verdict in verdicts)
    return Verdict(verdicts[0].round, tuple(contributions), rejected, update_squares**0.5, coded_bytes)
