"""The Ray actor around the core: takes events in, carries commands out, and streams records to the driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from hypha_ray.config import Job
from hypha_ray.errors import HyphaError
from hypha_ray.scheduler import commands as c
from hypha_ray.scheduler.assigner import Sizes
from hypha_ray.scheduler.core import Core
from hypha_ray.scheduler.crew import Crew
from hypha_ray.scheduler.weights import Weights
from hypha_ray.types import Commit, Delta, Failed, Source

SLICES_PER_WORKER = 4
"""Slices that the scheduler keeps in the object store, beside those that workers hold."""
FINISH_S = 10.0
"""Longest wait for telemetry at the end of a run."""


class Scheduler:
    """Runs one job.

    Args:
        job: the job file.
        run: name of the run.
        directory: the run directory.
        dataset: folder of the prepared dataset.

    """

    def __init__(self, job: Job, run: str, directory: str, dataset: str) -> None:
        self._job, self._run, self._dataset = job, run, dataset
        self._crew = Crew(job, run, directory)
        self._inbox: asyncio.Queue[c.Input] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._commits: set[asyncio.Task[None]] = set()
        """Of the tasks those that must be done before the run is."""
        self._payloads: dict[Source, list[Any]] = {}
        """Refs of the deltas of the round, by fragment; never read here."""
        self._slices: dict[int, Any] = {}
        """Refs of the slices sent last, for the next worker that needs one."""
        self._weights = Weights(job, self._crew)

    @ray.method(num_returns="streaming")
    async def run(self) -> AsyncIterator[dict[str, Any]]:
        """The whole job: yields status lines, records, and the summary at last; raises what ended the job."""
        try:
            yield _status("leasing machines")
            self._crew.open_shards(self._dataset)
            await self._crew.hire()
            for source in self._crew.sources:
                self._note("lease", worker=source.worker, incarnation=source.incarnation)
            for source in self._crew.sources:
                self._spawn(self._listen(source))
            yield _status(f"building the model on {len(self._crew.sources)} workers")
            core = await self._brain()
            while not core.over:
                event = await self._next(core.deadline)
                for command in core.handle(event, time.monotonic()):
                    for record in self._perform(command):
                        yield record
            await asyncio.gather(*self._commits)
            yield {"kind": "summary", **await self._finish()}
        except BaseException:
            await self._finish()
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            self._crew.end()

    async def _brain(self) -> Core:
        await self._weights.initialise()
        manifest = await self._crew.shards[0].announce.remote()
        held_samples = self._job.worker.prefetch_mb * 1_000_000 // manifest.sample_bytes
        sizes = Sizes(self._weights.layout.bytes(), max(1, held_samples))
        return Core(self._job, self._crew.sources, manifest.slices, sizes, time.monotonic())

    async def _next(self, deadline: float | None) -> c.Input:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return await asyncio.wait_for(self._inbox.get(), wait_s)
        except TimeoutError:
            return c.Tick()

    def _perform(self, command: c.Command) -> list[dict[str, Any]]:
        """Carry a command out; returns what the driver should see of it."""
        match command:
            case c.Feed(worker=worker, slice=index):
                self._spawn(self._feed(worker, index))
            case c.Assign(worker=worker, plan=plan):
                self._crew.workers[worker].assign.remote(plan)
            case c.Merge(worker=worker, round=number):
                self._weights.send(worker, number)
            case c.Reduce():
                self._spawn(self._reduce(command))
            case c.Persist():
                self._commits.add(self._spawn(self._persist(command)))
            case c.Dismiss(worker=worker):
                self._crew.dismiss(worker)
            case c.Record(fields=fields):
                self._crew.telemetry.write.remote([fields])
                return [dict(fields)]
            case c.Note(fields=fields):
                self._crew.telemetry.events.remote([fields])
            case c.Finish(error=error) if error is not None:
                raise error
        return []

    async def _listen(self, source: Source) -> None:
        """Take a worker's events off its stream as they come; what is not taken dies with the worker."""
        stream = self._crew.workers[source.worker].run.remote()
        try:
            async for ref in stream:
                event = await ref
                if isinstance(event, Delta):
                    self._payloads[source] = [await anext(stream) for _ in range(event.fragments)]
                self._inbox.put_nowait(event)
            return  # It has done its final plan, or was asked to stop.
        except (RayActorError, StopAsyncIteration) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        except Exception as error:
            cause = getattr(error, "cause", error)
            reason = f"the inner loop broke: {type(cause).__name__}: {cause}"
        self._inbox.put_nowait(c.Lost(source, reason))

    async def _feed(self, worker: int, index: int) -> None:
        shards = self._crew.shards
        if index not in self._slices:
            self._slices[index] = shards[index % len(shards)].read.remote(index)
        ref = self._slices[index] = self._slices.pop(index)
        while len(self._slices) > SLICES_PER_WORKER * len(self._crew.workers):
            del self._slices[next(iter(self._slices))]
        try:
            await self._crew.workers[worker].feed.remote(index, ref)
        except HyphaError as error:
            self._inbox.put_nowait(Failed(Source(self._run, worker, 0), -1, getattr(error, "cause", error)))
        except RayActorError:
            pass  # The worker is gone; its stream says so too.

    async def _reduce(self, command: c.Reduce) -> None:
        payloads = [self._payloads.pop(source) for source in command.sources]
        verdict = await self._weights.reduce(command, payloads)
        self._inbox.put_nowait(c.Reduced(verdict))

    async def _persist(self, command: c.Persist) -> None:
        commit: Commit = await self._weights.persist(command)
        fields = {"round": commit.round, "theta_sha256": commit.theta_sha256, "epoch": commit.epoch}
        self._note("commit", **fields, deltas=len(commit.deltas))

    async def _finish(self) -> dict[str, Any]:
        """Close the files and sinks; a run that failed has a summary too."""
        figures = self._crew.telemetry.finish.remote({"parameter_bytes": self._weights.bytes})
        try:
            return dict(await asyncio.wait_for(figures, FINISH_S))
        except (TimeoutError, RayError):
            return {}

    def _note(self, kind: str, **fields: Any) -> None:
        self._crew.telemetry.events.remote([{"kind": kind, "monotonic_s": time.monotonic(), **fields}])

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._inbox.put_nowait(Failed(Source(self._run, -1, 0), -1, error))


def _status(text: str) -> dict[str, Any]:
    return {"kind": "status", "text": text}
