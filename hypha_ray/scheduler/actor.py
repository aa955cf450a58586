"""The Ray actor around the core: takes events in, carries commands out, and streams records to the driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from hypha_ray.config import Job
from hypha_ray.errors import CapacityError, HyphaError
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.market.allocator import cluster_nodes
from hypha_ray.market.requirements import workers_to_start
from hypha_ray.scheduler import commands as c
from hypha_ray.scheduler.assigner import Sizes
from hypha_ray.scheduler.core import Core
from hypha_ray.scheduler.crew import Crew
from hypha_ray.scheduler.larder import Larder
from hypha_ray.scheduler.past import Past
from hypha_ray.scheduler.weights import Weights
from hypha_ray.telemetry.files import METRICS, rewind
from hypha_ray.types import Delta, Failed, Saved, Source

DRAIN_CHECK_S = 2.0
"""Seconds between two looks at which nodes are about to go."""
BACKLOG = 1000
"""Records that wait for a telemetry actor which is being replaced; more are dropped."""
FINISH_S = 10.0
"""Longest wait for telemetry at the end of a run."""


class Scheduler:
    """Runs one job.

    Args:
        job: the job file.
        run: name of the run.
        directory: the run directory.
        dataset: folder of the prepared dataset.
        attempt: number of this scheduler, over the whole run.

    """

    def __init__(self, job: Job, run: str, directory: str, dataset: str, attempt: int) -> None:
        arm(job.testing.failpoints, job.testing.failpoint_log)
        self._job, self._run, self._directory, self._attempt = job, run, Path(directory), attempt
        self._crew = Crew(job, run, directory, dataset, self._revived)
        self._weights = Weights(job, self._crew)
        self._larder = Larder(job, self._crew)
        self._inbox: asyncio.Queue[c.Input] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._commits: set[asyncio.Task[None]] = set()
        """Of the tasks those that must be done before the run is."""
        self._recalled = asyncio.Event()
        """Set once telemetry may open its files."""
        self._telling: set[asyncio.Task[None]] = set()
        self._dropped = 0
        self._hiring: dict[Source, asyncio.Task[None]] = {}
        self._payloads: dict[tuple[Source, int], list[Any]] = {}
        """Refs of deltas, by fragment, and of the inner state if there is one; never read here."""

    async def ping(self) -> int:
        """The process id: an answer shows that the actor lives."""
        return os.getpid()

    @ray.method(num_returns="streaming")
    async def run(self) -> AsyncIterator[dict[str, Any]]:
        """The whole job: yields status lines, records, and the summary at last; raises what ended the job."""
        try:
            yield _status("leasing machines")
            past = await self._recall()
            core = await self._brain(past)
            commands = core.start(await self._fitting(past), time.monotonic())
            self._spawn(self._initialise(past))
            self._spawn(self._watch_nodes())
            yield _status("starting workers and building the model")
            while True:
                for command in commands:
                    for record in self._perform(command):
                        yield record
                if core.over:
                    break
                commands = core.handle(await self._next(core.deadline), time.monotonic())
            await asyncio.gather(*self._commits)
            yield {"kind": "summary", **await self._finish()}
        except BaseException:
            await self._finish()
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            self._crew.end()

    # ── the start ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _recall(self) -> Past:
        """What an earlier scheduler of this run has left in the log."""
        survey = await (await self._crew.store.ask(lambda store: store.survey.remote()))
        past = Past(self._attempt)
        if survey is not None:
            used = {"epoch": survey.epoch, "used": survey.used}
            inner = frozenset(survey.inner)
            past = Past(self._attempt, survey.next_round, used, survey.state, inner, survey.skipped)
        await asyncio.to_thread(rewind, self._directory / METRICS, past.next_round)
        self._recalled.set()
        return past

    async def _brain(self, past: Past) -> Core:
        manifest = await self._larder.manifest()
        held_samples = self._job.worker.prefetch_mb * 1_000_000 // manifest.sample_bytes
        return Core(self._job, self._run, manifest.slices, Sizes(max(1, held_samples)), past)

    async def _fitting(self, past: Past) -> int:
        """Workers that there is room for now; a run that has begun waits for room instead of giving up."""
        try:
            return workers_to_start(self._job, await asyncio.to_thread(cluster_nodes))
        except CapacityError:
            if past.attempt == 1 and past.next_round == 0:
                raise
            return 0

    async def _initialise(self, past: Past) -> None:
        self._inbox.put_nowait(await self._weights.initialise(past.next_round > 0))

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(DRAIN_CHECK_S)
            if workers := await asyncio.to_thread(self._crew.draining):
                self._inbox.put_nowait(c.Draining(workers, "its node is being drained"))

    # ── events in, commands out ───────────────────────────────────────────────────────────────────────────────────

    async def _next(self, deadline: float) -> c.Input:
        try:
            return await asyncio.wait_for(self._inbox.get(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return c.Tick()

    def _perform(self, command: c.Command) -> list[dict[str, Any]]:
        """Carry a command out; returns what the driver should see of it."""
        match command:
            case c.Hire(source=source):
                self._hiring[source] = self._spawn(self._hire(source))
            case c.Dismiss(worker=worker):
                for source in [source for source in self._hiring if source.worker == worker]:
                    self._hiring.pop(source).cancel()
                self._crew.dismiss(worker)
            case c.Feed() | c.Assign() | c.Merge() | c.Restore() | c.Retire():
                if command.worker in self._crew.workers:
                    self._order(command, self._crew.workers[command.worker])
            case c.Reduce():
                self._spawn(self._reduce(command))
            case c.Persist():
                failpoint("scheduler.before_persist")
                self._commits.add(self._spawn(self._persist(self._weights.persist(command))))
            case c.Record(fields=fields):
                self._tell(lambda telemetry: telemetry.write.remote([fields]))
                return [dict(fields)]
            case c.Note(fields=fields):
                self._tell(lambda telemetry: telemetry.events.remote([fields]))
            case c.Finish(error=error) if error is not None:
                raise error
        return []

    def _order(self, command: c.Command, worker: Any) -> None:
        """Tell a worker something; whether it hears it shows in its stream."""
        match command:
            case c.Feed(worker=number, slice=index):
                self._spawn(self._feed(number, index))
            case c.Assign(plan=plan):
                worker.assign.remote(plan)
            case c.Merge(round=number):
                self._weights.send(worker, number)
                failpoint("scheduler.mid_broadcast")
            case c.Restore(worker=number):
                worker.restore.remote(self._weights.inner[number])
            case c.Retire(reason=reason):
                worker.leave.remote(reason)

    async def _hire(self, source: Source) -> None:
        try:
            stream = await self._crew.hire(source)
        except HyphaError as error:
            self._inbox.put_nowait(c.Unplaced(source, error.what))
            return
        finally:
            self._hiring.pop(source, None)
        self._note("lease", worker=source.worker, incarnation=source.incarnation)
        self._spawn(self._listen(source, stream))

    async def _listen(self, source: Source, stream: Any) -> None:
        """Take a worker's events off its stream as they come; what is not taken dies with the worker."""
        try:
            async for ref in stream:
                event = await ref
                if isinstance(event, Delta):
                    await self._take(event, stream)
                self._inbox.put_nowait(event)
            return  # It has done its final plan, or was asked to stop.
        except (RayActorError, StopAsyncIteration) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        except Exception as error:
            cause = getattr(error, "cause", error)
            reason = f"the inner loop broke: {type(cause).__name__}: {cause}"
        self._inbox.put_nowait(c.Lost(source, reason))

    async def _take(self, delta: Delta, stream: Any) -> None:
        """Take a delta's payloads, which are there for certain once something that comes after them is."""
        refs = [await anext(stream) for _ in range(delta.fragments + delta.inner_state)]
        self._inbox.put_nowait(await (await anext(stream)))
        self._payloads.setdefault((delta.source, delta.round), refs)
        self._spawn(self._fetch(refs[: delta.fragments]))

    async def _fetch(self, payloads: list[Any]) -> None:
        with contextlib.suppress(ObjectLostError):  # The reduction finds out, and does without.
            await self._weights.fetch(payloads)

    async def _feed(self, worker: int, index: int) -> None:
        for _ in range(2):
            ref = await self._larder.slice(index)
            if worker not in self._crew.workers:
                return
            try:
                await self._crew.workers[worker].feed.remote(index, ref)
                return
            except RayActorError:
                return  # The worker is gone; its stream says so too.
            except ObjectLostError:
                self._larder.forget(index)

    async def _reduce(self, command: c.Reduce) -> None:
        failpoint("scheduler.before_reduce")
        taken = {source: self._payloads[source, command.round] for source in command.sources}
        fragments = self._job.sync.fragments
        verdict = await self._weights.reduce(command, [taken[source][:fragments] for source in command.sources])
        failpoint("scheduler.after_reduce")
        for source in command.sources:
            if source.worker in {one.worker for one in verdict.accepted} and len(taken[source]) > fragments:
                self._weights.inner[source.worker] = taken[source][fragments]
        self._payloads = {key: refs for key, refs in self._payloads.items() if key[1] > command.round}
        self._inbox.put_nowait(c.Reduced(verdict))

    async def _persist(self, saving: Awaitable[Saved]) -> None:
        saved = await saving
        failpoint("scheduler.after_commit")
        commit = saved.commit
        fields = {"round": commit.round, "theta_sha256": commit.theta_sha256, "epoch": commit.epoch}
        self._note("commit", **fields, deltas=len(commit.deltas))
        self._inbox.put_nowait(c.Committed(saved))

    # ── telemetry, and the end ────────────────────────────────────────────────────────────────────────────────────

    def _revived(self, name: str, reason: str) -> None:
        self._note("revive", role=name, reason=reason)

    def _note(self, kind: str, **fields: Any) -> None:
        note = {"kind": kind, "monotonic_s": time.monotonic(), **fields}
        self._tell(lambda telemetry: telemetry.events.remote([note]))

    def _tell(self, call: Callable[[Any], Any]) -> None:
        """Give telemetry something; training never waits for it."""
        if len(self._telling) >= BACKLOG:
            self._dropped += 1
            return
        task = asyncio.get_running_loop().create_task(self._told(call))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _told(self, call: Callable[[Any], Any]) -> None:
        try:
            await self._recalled.wait()
            await self._crew.telemetry.ask(call)
        except (HyphaError, RayError):
            self._dropped += 1

    async def _finish(self) -> dict[str, Any]:
        """Close the files and sinks; a run that failed has a summary too."""
        extra = {"parameter_bytes": self._weights.bytes, "attempt": self._attempt, "dropped": self._dropped}
        try:
            await asyncio.wait(self._telling, timeout=FINISH_S) if self._telling else None
            ask = self._crew.telemetry.ask(lambda telemetry: telemetry.finish.remote(extra))
            return dict(await (await asyncio.wait_for(ask, FINISH_S)))
        except (TimeoutError, RayError, HyphaError):
            return {}

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._inbox.put_nowait(Failed(Source(self._run, -1, 0), -1, getattr(error, "cause", None) or error))


def _status(text: str) -> dict[str, Any]:
    return {"kind": "status", "text": text}
