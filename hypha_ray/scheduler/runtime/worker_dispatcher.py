"""The scheduler's dealings with workers: hires them, listens to them, and sees that they hear their orders."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from hypha_ray.errors import HyphaError, QuarantinedError
from hypha_ray.failpoints import failpoint
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.runtime.global_weights import GlobalWeights
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.slice_cache import SliceCache
from hypha_ray.scheduler.runtime.streams import upcoming
from hypha_ray.scheduler.runtime.supervised_actor import GONE
from hypha_ray.scheduler.runtime.telemetry_client import TelemetryClient
from hypha_ray.types import Alive, Delta, Left, Source

AGAIN_S = 0.2
"""Wait before an order that was lost is given again."""
PARTING_S = 5.0
"""Longest wait for workers that have done their final plans to end by themselves."""
SECURE_S = 60.0
"""Longest wait for payloads of a worker that leaves to be on other nodes than its own, which may end with it."""
PULSE_S = 1.0
"""Seconds between two words for a worker that is done and waits for that."""


class WorkerDispatcher:
    """Carries out commands that concern workers.

    Args:
        actors: where they are.
        weights: what they start from.
        slice_cache: what they train on.
        telemetry: told of leases.
        inbox: takes what they say.
        spawn: runs a coroutine beside this.

    """

    def __init__(
        self,
        actors: RunActors,
        weights: GlobalWeights,
        slice_cache: SliceCache,
        telemetry: TelemetryClient,
        inbox: Callable[[c.Input], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._actors, self._weights, self._slice_cache, self._telemetry = actors, weights, slice_cache, telemetry
        self._inbox, self._spawn = inbox, spawn
        self._hiring: dict[Source, asyncio.Task[None]] = {}
        self._listening: dict[int, asyncio.Task[None]] = {}
        """To the newest stream of each worker."""
        self._parting: set[asyncio.Task[None]] = set()
        """Of these, to workers with a final plan."""
        self._payloads: dict[tuple[Source, int], list[Any]] = {}
        """Refs of deltas, by fragment, and of the inner state if there is one; never read here."""
        self._securing: dict[Source, set[asyncio.Task[None]]] = {}
        """Payloads on their way to where they are needed, by the worker that is to be kept so long."""

    def hire(self, source: Source) -> None:
        """Begin to look for a machine; what comes of it will be said."""
        self._hiring[source] = self._spawn(self._hire(source))

    def dismiss(self, worker: int) -> None:
        """End a worker, or the search for a machine for one."""
        for source in [source for source in self._hiring if source.worker == worker]:
            self._hiring.pop(source).cancel()
        self._actors.dismiss(worker)

    def order(self, command: c.Feed | c.Assign | c.Merge | c.RestoreInnerState | c.Drain) -> None:
        """Tell a worker something, in order; what gets lost on the way is told again."""
        found = self._actors.worker(command.worker)
        if found is None:
            return
        worker, to = found
        match command:
            case c.Feed(slice=index):
                self._spawn(self._feed(worker, index))
            case c.Assign(plan=plan):
                if plan.final:
                    self._parting.add(self._listening[command.worker])
                self._say(worker, lambda one: one.assign.remote(to, plan))
            case c.Merge(round=number, whole=whole):
                for call in self._weights.orders(to, number, whole):
                    self._say(worker, call)
                failpoint("scheduler.mid_broadcast")
            case c.RestoreInnerState():
                state = self._weights.inner[command.worker]
                self._say(worker, lambda one: one.restore.remote(to, state))
            case c.Drain(reason=reason):
                self._say(worker, lambda one: one.leave.remote(reason))

    async def part(self) -> None:
        """Wait for workers that have done everything: external trainers have yet to be told so."""
        if self._parting:
            await asyncio.wait(self._parting, timeout=PARTING_S)

    def payloads(self, command: c.Reduce) -> list[list[Any]]:
        """Payloads to reduce; these, and payloads of no further use, are forgotten."""
        rounds = command.rounds or (command.round,) * len(command.sources)
        taken = list(zip(command.sources, rounds, strict=True))
        found = [self._payloads[key] for key in taken]
        since = command.round + 1 if command.since is None else command.since
        kept = [key for key in self._payloads if key[1] >= since and key not in taken]
        self._payloads = {key: self._payloads[key] for key in kept}
        return found

    async def _hire(self, source: Source) -> None:
        try:
            stream, kept = await self._actors.hire(source)
        except HyphaError as error:
            self._inbox(c.PlacementFailed(source, error.what))
            return
        finally:
            self._hiring.pop(source, None)
        self._telemetry.note("lease", worker=source.worker, incarnation=source.incarnation, kept=kept)
        if self._actors.bridges(source.worker):
            self._spawn(self._describe(source))
        self._listening[source.worker] = self._spawn(self._listen(source, stream))

    async def _describe(self, source: Source) -> None:
        """Tell a worker that doesn't build the model where its tensors lie, once that is known."""
        layout = await self._weights.described()
        found = self._actors.worker(source.worker)
        if found is not None and found[1] == source:
            self._say(found[0], lambda one: one.describe.remote(source, layout))

    async def _listen(self, source: Source, stream: Any) -> None:
        """Take a worker's events off its stream as they come; what is not taken dies with the worker."""
        exception = None
        try:
            async for ref in stream:
                event = await ref
                if isinstance(event, Delta):
                    await self._take(event, stream)
                elif isinstance(event, Left):
                    await self._secured(source)
                self._inbox(event)
            return  # It has done its final plan, or was asked to stop.
        except (RayActorError, StopAsyncIteration) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        except Exception as error:
            cause = getattr(error, "cause", error)
            text = " ".join(f"{type(cause).__name__}: {cause}".split())
            reason, exception = f"the inner loop broke: {text}", text if cause is not error else None
        finally:
            self._securing.pop(source, None)
        self._inbox(c.Lost(source, reason, exception))

    async def _take(self, delta: Delta, stream: Any) -> None:
        """Take a delta's payloads, which are there for certain once something that comes after them is."""
        refs = []
        for _ in range(delta.fragments + delta.inner_state):
            await upcoming(stream)
            refs.append(await anext(stream))
        self._inbox(await (await anext(stream)))
        self._payloads.setdefault((delta.source, delta.round), refs)
        fetching = self._spawn(self._fetch(delta, refs))
        tasks = self._securing.setdefault(delta.source, set())
        tasks.add(fetching)
        fetching.add_done_callback(tasks.discard)

    async def _fetch(self, delta: Delta, payloads: list[Any]) -> None:
        failpoint("scheduler.before_fetch", delta.source.worker)
        with contextlib.suppress(*GONE):  # The reduction finds out, and does without.
            await self._weights.fetch(delta.round, payloads)

    async def _secured(self, source: Source) -> None:
        """Wait until what a worker has handed over is elsewhere, too; it can't speak for itself any more."""
        deadline = time.monotonic() + SECURE_S
        while (tasks := self._securing.get(source)) and time.monotonic() < deadline:
            await asyncio.wait(tasks, timeout=PULSE_S)
            self._inbox(Alive(source, -1))

    async def _feed(self, worker: Any, index: int) -> None:
        for again in (True, False):
            try:
                call = partial(_fed, index, await self._slice_cache.slice(index))
            except QuarantinedError as error:
                self._telemetry.note("quarantine", slice=index, reason=error.got)
                raise
            try:
                await self._heard(worker, call, call(worker))
                return
            except GONE:
                self._slice_cache.forget(index)
                if not again:
                    raise

    def _say(self, worker: Any, call: Callable[[Any], Any]) -> None:
        self._spawn(self._heard(worker, call, call(worker)))

    async def _heard(self, worker: Any, call: Callable[[Any], Any], answer: Any) -> None:
        """See that a worker has heard an order: it may come twice, and its death shows in its stream.

        Raises:
            RayTaskError: it lives, but what the order is about is lost.

        """
        while True:
            try:
                await answer
                return
            except RayTaskError:
                raise
            except ActorUnavailableError:  # Lost on the way, or its answer was.
                await asyncio.sleep(AGAIN_S)
                answer = call(worker)
            except RayActorError:
                return


def _fed(index: int, ref: Any, worker: Any) -> Any:
    return worker.feed.remote(index, ref)
