"""Dispatch of commands to workers, and of their events to the scheduler's core."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import ray
from ray import ObjectRefGenerator
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from hypha_ray.errors import HyphaError, QuarantinedError, first_line, reason_of
from hypha_ray.failpoints import failpoint
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.runtime.global_weights import GlobalWeights
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.slice_readers import SliceCache
from hypha_ray.scheduler.runtime.supervised_actor import GONE, death_text
from hypha_ray.scheduler.runtime.telemetry_client import RoundTraces, TelemetryClient
from hypha_ray.types import Alive, Delta, Left, Source, WeightsVersion
from hypha_ray.worker.incarnation import ProcessLostError

FIRST_POLL_S = 0.002
LONGEST_POLL_S = 0.05
"""Seconds between two checks for the next item: the first, and the most."""
AGAIN_S = 0.2
"""Seconds before a lost order is repeated."""
PARTING_S = 5.0
"""Longest wait for workers with a final plan to end by themselves, in seconds."""
SECURE_S = 60.0
"""Longest wait for a leaving worker's payloads to reach other nodes, in seconds: its own node may end with it."""
PULSE_S = 1.0
"""Seconds between two signs of life sent for a worker whose payloads are being copied."""


async def upcoming(stream: Any) -> None:
    """Wait until a stream has its next item, on whatever node the item lies.

    Ray's own ``anext`` waits for the item's value, which would copy to this node a payload that another node needs.
    """
    wait_s = FIRST_POLL_S
    while isinstance(stream, ObjectRefGenerator):
        ready_streams, _ = await asyncio.to_thread(ray.wait, [stream], timeout=0, fetch_local=False)
        if ready_streams:
            return
        await asyncio.sleep(wait_s)
        wait_s = min(LONGEST_POLL_S, 1.5 * wait_s)


class WorkerDispatcher:
    """Carries out commands that concern workers.

    Args:
        actors: actors of the run.
        weights: global weights that workers start from.
        slice_cache: slices that workers train on.
        telemetry: takes events of leases and quarantine.
        inbox: takes events of workers.
        spawn: runs a coroutine in the background.
        round_traces: takes the transfers of payloads and weights.

    """

    def __init__(
        self,
        actors: RunActors,
        weights: GlobalWeights,
        slice_cache: SliceCache,
        telemetry: TelemetryClient,
        inbox: Callable[[c.Input], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        round_traces: RoundTraces,
    ) -> None:
        self._actors = actors
        self._weights = weights
        self._slice_cache = slice_cache
        self._telemetry = telemetry
        self._inbox = inbox
        self._spawn = spawn
        self._round_traces = round_traces
        self._hiring: dict[Source, asyncio.Task[None]] = {}
        self._listening: dict[int, asyncio.Task[None]] = {}
        """Task that reads the newest stream of each worker."""
        self._parting: set[asyncio.Task[None]] = set()
        """Tasks of `_listening` whose workers have a final plan."""
        self._payloads: dict[tuple[Source, int], list[Any]] = {}
        """References to the payloads of deltas by fragment, then to the inner state if any; never read here."""
        self._fetching: dict[Source, set[asyncio.Task[None]]] = {}
        """Tasks that copy payloads to the nodes that need them, by the worker that must live until then."""

    def hire(self, source: Source) -> None:
        """Begin to place a worker; the result comes as an event."""
        self._hiring[source] = self._spawn(self._hire(source))

    def dismiss(self, worker: int) -> None:
        """End a worker, or the attempt to place one."""
        for source in list(self._hiring):
            if source.worker == worker:
                hiring = self._hiring.pop(source)
                hiring.cancel()
        self._actors.dismiss(worker)

    def order(self, command: c.Order) -> None:
        """Send a worker an order; an order that is lost on the way is repeated."""
        handle_and_source = self._actors.worker(command.worker)
        if handle_and_source is None:
            return
        handle, source = handle_and_source
        match command:
            case c.Feed(slice=index):
                self._spawn(self._feed(command.worker, handle, index))
            case c.Assign(plan=plan):
                if plan.final:
                    self._parting.add(self._listening[command.worker])
                self._call_worker(handle, lambda worker: worker.assign.remote(source, plan))
            case c.Merge(version=version, whole=whole):
                for call in self._weights.orders(source, version, whole):
                    answer = call(handle)
                    self._spawn(self._send_weights(source.worker, version, handle, call, answer))
                failpoint("scheduler.mid_broadcast")
            case c.RestoreInnerState():
                state = self._weights.inner[command.worker]
                self._call_worker(handle, lambda worker: worker.restore.remote(source, state))
            case c.Drain(reason=reason):
                self._call_worker(handle, lambda worker: worker.leave.remote(reason))

    async def wait_for_parting(self) -> None:
        """Wait for workers that are done, because their external trainers have yet to be told."""
        if self._parting:
            await asyncio.wait(self._parting, timeout=PARTING_S)

    def payloads(self, command: c.Reduce) -> list[list[Any]]:
        """Return references to the payloads of a reduction; forget them, and those that are too old to be used."""
        rounds = command.rounds or (command.round,) * len(command.sources)
        oldest_round = command.round + 1 if command.oldest_round is None else command.oldest_round
        payloads = [self._payloads.pop(key) for key in zip(command.sources, rounds, strict=True)]
        for source, round_number in list(self._payloads):
            if round_number < oldest_round:
                del self._payloads[source, round_number]
        return payloads

    async def _hire(self, source: Source) -> None:
        try:
            stream, is_taken_over = await self._actors.hire(source)
        except HyphaError as error:
            self._inbox(c.PlacementFailed(source, error.what))
            return
        finally:
            self._hiring.pop(source, None)
        fields = {"worker": source.worker, "incarnation": source.incarnation, "kept": is_taken_over}
        self._telemetry.note("lease", **fields, **self._actors.terms(source.worker))
        self._inbox(c.Leased(source))
        if self._actors.bridges(source.worker):
            self._spawn(self._send_layout(source))
        await self._slice_cache.locate(source.worker)
        self._listening[source.worker] = self._spawn(self._listen(source, stream))

    async def _send_layout(self, source: Source) -> None:
        """Send the layout, once it is known, to a worker that doesn't build the model."""
        layout = await self._weights.described()
        handle, present_source = self._actors.worker(source.worker) or (None, None)
        if present_source == source:
            self._call_worker(handle, lambda worker: worker.describe.remote(source, layout))

    async def _listen(self, source: Source, stream: Any) -> None:
        """Take events off a worker's stream as they arrive; other items are lost with the worker."""
        exception = None
        try:
            async for ref in stream:
                event = await ref
                if isinstance(event, Delta):
                    await self._take_payloads(event, stream)
                elif isinstance(event, Left):
                    await self._wait_for_fetches(source)
                self._inbox(event)
            return  # The worker has done its final plan, or was asked to stop.
        except StopAsyncIteration:
            reason = "its stream ended in the middle of a delta"
        except RayActorError as error:
            reason = death_text(error)
        except Exception as error:
            cause = getattr(error, "cause", error)
            places = " ".join(getattr(cause, "__notes__", ()))
            text = f"{reason_of(cause)} {places}".strip()
            reason = f"the inner loop broke: {text}"
            if isinstance(cause, ProcessLostError):
                reason = first_line(cause)
            elif cause is not error:
                exception = text
        finally:
            self._fetching.pop(source, None)
        self._inbox(c.Lost(source, reason, exception))

    async def _take_payloads(self, delta: Delta, stream: Any) -> None:
        """Take a delta's payloads, which are complete once the item after them is there."""
        refs = []
        for _ in range(delta.fragments + delta.inner_state):
            await upcoming(stream)
            refs.append(await anext(stream))
        event_after = await anext(stream)
        self._inbox(await event_after)
        self._payloads.setdefault((delta.source, delta.round), refs)
        fetching = self._spawn(self._fetch(delta, refs))
        tasks = self._fetching.setdefault(delta.source, set())
        tasks.add(fetching)
        fetching.add_done_callback(tasks.discard)

    async def _fetch(self, delta: Delta, payloads: list[Any]) -> None:
        failpoint("scheduler.before_fetch", delta.source.worker)
        worker = delta.source.worker
        transfer = self._round_traces.transfer(delta.round, "up", worker, bytes=delta.payload_bytes)
        with contextlib.suppress(*GONE), transfer:  # The reduction finds out, and does without.
            await self._weights.fetch(delta.round, payloads)

    async def _wait_for_fetches(self, source: Source) -> None:
        """Wait until the payloads of a worker that has left are on other nodes; renew its lease meanwhile."""
        deadline = time.monotonic() + SECURE_S
        while (tasks := self._fetching.get(source)) and time.monotonic() < deadline:
            await asyncio.wait(tasks, timeout=PULSE_S)
            self._inbox(Alive(source))

    async def _feed(self, worker_number: int, worker: Any, index: int) -> None:
        for again in (True, False):
            try:
                tensors = await self._slice_cache.slice(index, worker_number)
            except QuarantinedError as error:
                self._telemetry.note("quarantine", slice=index, reason=error.got)
                raise
            call = partial(_feed_slice, index, tensors)
            try:
                await self._await_answer(worker, call, call(worker))
                return
            except GONE:
                self._slice_cache.forget(index)
                if not again:
                    raise

    async def _send_weights(
        self, worker_number: int, version: WeightsVersion, worker: Any, call: Any, answer: Any
    ) -> None:
        with self._round_traces.transfer(self._round_traces.of_weights(version), "down", worker_number):
            await self._await_answer(worker, call, answer)

    def _call_worker(self, worker: Any, call: Callable[[Any], Any]) -> None:
        answer = call(worker)
        self._spawn(self._await_answer(worker, call, answer))

    async def _await_answer(self, worker: Any, call: Callable[[Any], Any], answer: Any) -> None:
        """Repeat an order until the worker has it: it may arrive twice, and a death shows in the stream.

        Raises:
            RayTaskError: the worker lives, but an object of the order is lost.

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


def _feed_slice(index: int, tensors: Any, worker: Any) -> Any:
    return worker.feed.remote(index, tensors)
