"""The Ray actor around the core: takes events in, carries commands out, and streams records to the driver."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from hypha_ray.config import Job
from hypha_ray.data.mixture import DATASET, RunDataset, described
from hypha_ray.data.storage.files import Place
from hypha_ray.errors import HyphaError, LostError, QuarantinedError, first_line
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore, search_less_often
from hypha_ray.scheduler.planning.worker_plans import Sizes
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.runtime.global_weights import GlobalWeights
from hypha_ray.scheduler.runtime.market_client import CostBook, SpeedBook, Staffing
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.slices.slice_readers import SliceCache, reader_of
from hypha_ray.scheduler.runtime.supervised_actor import GONE, NodeAttendance
from hypha_ray.scheduler.runtime.telemetry_client import TelemetryClient
from hypha_ray.scheduler.runtime.worker_dispatcher import WorkerDispatcher
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import METRICS, by_round, read_json, read_jsonl, rewind
from hypha_ray.types import Event, Saved
from hypha_ray.worker.actor import FromDataset

NEWS_S = 1.0
"""Seconds between two checks for news while machines are awaited, or the last commits are made."""
DRAIN_CHECK_S = 2.0
"""Seconds between two checks for nodes that are drained."""


class Scheduler:
    """Runs one job.

    Args:
        job: the job file.
        run: name of the run.
        directory: the run directory.
        places: place of each dataset; more than one in a mixture.
        attempt: number of this scheduler, over the whole run.
        owner: the actor that starts what outlives this scheduler.
        from_dataset: what workers are told of the dataset, as `TrainWorker` takes it.

    """

    def __init__(
        self,
        job: Job,
        run: str,
        directory: str,
        places: tuple[Place, ...],
        attempt: int,
        owner: Any,
        from_dataset: FromDataset,
    ) -> None:
        arm(job.testing.failpoints, job.testing.failpoint_log)
        search_less_often(job.num_workers)
        self._job = job
        self._run = run
        self._directory = Path(directory)
        self._attempt = attempt
        self._inbox: asyncio.Queue[c.Input] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._commits: set[asyncio.Task[None]] = set()
        """Commits that the end of the run waits for; a failed one stays, so that its error is raised there."""
        self._unwritten: list[dict[str, Any]] = []
        """Fields of the commits that wait for room on the disk."""
        self._telemetry = TelemetryClient(job.num_workers)
        self._actors = RunActors(job, run, directory, owner, self._telemetry.replaced, from_dataset)
        self._telemetry.telemetry = self._actors.telemetry
        self._weights = GlobalWeights(job, self._actors)
        begun = RunDataset.parse(read_json(self._directory / DATASET))
        self._reader = reader_of(places, job, self._actors, self._telemetry.problem, begun)
        self._is_new_dataset = begun.sha256 is None
        self._slice_cache = SliceCache(job, self._actors, self._reader)
        self._staffing = Staffing(job, run, self._actors)
        self._costs = CostBook(self._actors, self._telemetry, self._directory)
        self._speeds = SpeedBook(job, run, self._actors)
        self._core: SchedulerCore | None = None
        self._dispatcher = WorkerDispatcher(
            self._actors, self._weights, self._slice_cache, self._telemetry, self._said, self._spawn
        )

    async def ping(self) -> int:
        """Return the process id, as a sign of life."""
        return os.getpid()

    @ray.method(num_returns="streaming")
    async def run(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Run the job: yield status lines and records, then the summary; raise the error that ended the job."""
        try:
            failpoint("scheduler.start")
            yield [_status("leasing machines")]
            past = await self._recall()
            thinking = asyncio.ensure_future(self._brain(past))
            async for records in self._due_until(thinking):
                yield records
            core = self._core = await thinking
            hiring = asyncio.ensure_future(self._staffing.workers_to_hire(past))
            if not (await asyncio.wait({hiring}, timeout=NEWS_S))[0]:
                yield [_status("waiting for machines; python jobs/market.py shows what others bid")]
            commands = core.start(await hiring, time.monotonic())
            self._spawn(self._initialise(past))
            self._spawn(self._watch_nodes())
            yield [_status("starting workers and building the model")]
            while True:
                for command in commands:
                    self._perform(command)
                if records := self._telemetry.for_driver(core.over):
                    yield records
                if core.over:
                    _raise_what_ended(commands)
                    break
                commands = core.handle(await self._next(core.deadline), time.monotonic())
            async for records in self._settling():
                yield records
            yield [{"kind": "summary", **await self._finish()}]
        except (QuarantinedError, LostError):  # The next scheduler takes the workers over.
            await self._finish()
            raise
        except BaseException as error:
            await self._copied(error)
            await self._finish()
            self._actors.end()
            raise
        else:
            self._actors.end()
        finally:
            for task in self._tasks:
                task.cancel()

    # ── the start ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _due_until(self, task: asyncio.Future[Any]) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield records and lines that are due at the driver until a task is done."""
        while not (await asyncio.wait({task}, timeout=NEWS_S))[0]:
            if records := self._telemetry.for_driver():
                yield records

    async def _recall(self) -> ResumePoint:
        """Read the point from which the log of an earlier scheduler lets the run go on."""
        survey = await (await self._actors.store.ask(lambda store: store.survey.remote()))
        metrics = self._directory / METRICS
        past = ResumePoint(self._attempt)
        if survey is not None:
            aside = await (await self._actors.store.ask(lambda store: store.quarantined.remote()))
            used = {"epoch": survey.epoch, "used": [span for span in survey.used if span[1] not in aside]}
            evaluations = by_round(read_jsonl(metrics, kinds=("eval",)), "eval")
            before = tuple(one for one in evaluations if one["round"] < survey.next_round)
            known = used, survey.state, frozenset(survey.inner), survey.layout, before, survey.skipped
            past = ResumePoint(self._attempt, survey.next_round, *known)
        await asyncio.to_thread(rewind, metrics, past.next_round)
        await self._costs.recall()
        self._telemetry.open()
        return past

    async def _brain(self, past: ResumePoint) -> SchedulerCore:
        manifest = await self._reader.manifest()
        if self._is_new_dataset:
            RunDirectory(self._directory).write(DATASET, described(manifest))
        self._actors.leases.training = self._speeds.open(manifest.shapes)
        held_samples = self._job.worker.prefetch_mb * 1_000_000 // manifest.sample_bytes
        slices = await self._slice_cache.usable(manifest.slices)
        sizes = Sizes(max(1, held_samples), self._slice_cache.near)
        return SchedulerCore(self._job, self._run, slices, sizes, past)

    async def _initialise(self, past: ResumePoint) -> None:
        self._inbox.put_nowait(await self._weights.initialise(past.next_round > 0, past.layout))
        await self._weights.prepare()

    async def _watch_nodes(self) -> None:
        told: Mapping[str, str] = {}
        attendance = NodeAttendance()
        while True:
            await asyncio.sleep(DRAIN_CHECK_S)
            with suppress(RayError):  # The control service doesn't answer: the next look will find it.
                nodes = await asyncio.to_thread(ray.nodes)
                workers = await self._actors.workers_by_node()
                for lost in attendance.lost(nodes, workers, time.monotonic()):
                    self._telemetry.note("machine_loss", machine=lost.name, workers=lost.workers)
                for worker, reason in (await self._staffing.leaving()).items():
                    self._inbox.put_nowait(c.Draining((worker,), reason))
                for name in self._actors.notices.keys() - told.keys():
                    self._telemetry.problem(f"{name} has to leave its machine: {self._actors.notices[name]}")
                told = self._actors.notices
                self._actors.evict()

    # ── events in, commands out ───────────────────────────────────────────────────────────────────────────────────

    def _said(self, event: c.Input) -> None:
        """Put an event into the inbox; silence is judged by the time when it came."""
        if self._core is not None and isinstance(event, Event):
            self._core.arrived(event, time.monotonic())
            self._speeds.hear(event)
        self._inbox.put_nowait(event)

    async def _next(self, deadline: float) -> c.Input:
        try:
            heard = await asyncio.wait_for(self._inbox.get(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return c.Tick()
        if isinstance(heard, c.Reduced):
            self._weights.advance()
        return heard

    def _perform(self, command: c.Command) -> None:
        """Carry a command out."""
        match command:
            case c.Hire(source=source):
                self._dispatcher.hire(source)
            case c.Dismiss(worker=worker):
                self._dispatcher.dismiss(worker)
            case c.Feed() | c.Assign() | c.Merge() | c.RestoreInnerState() | c.Drain():
                self._dispatcher.order(command)
            case c.Reduce():
                self._spawn(self._reduce(command))
            case c.Persist():
                failpoint("scheduler.before_persist")
                commit = self._spawn(self._persist(self._weights.persist(command)))
                self._commits.add(commit)
                commit.add_done_callback(self._committed)
            case c.LogMetric(fields=fields):
                self._telemetry.record({**fields, **self._of_round()} if fields["kind"] == "round" else fields)
            case c.LogEvent(fields=fields):
                self._telemetry.event(fields)

    def _of_round(self) -> dict[str, Any]:
        """Fields of a round's record that the core doesn't know of: bytes by data node, and cost."""
        self._spawn(self._speeds.post())
        read = self._reader.traffic()
        return ({"bytes_from": read} if read else {}) | self._costs.bill()

    async def _reduce(self, command: c.Reduce) -> None:
        failpoint("scheduler.before_reduce")
        taken = self._dispatcher.payloads(command)
        fragments = len(fragments_of_round(self._job, command.round))
        verdict = await self._weights.reduce(command, [refs[:fragments] for refs in taken])
        failpoint("scheduler.after_reduce")
        for rejection in verdict.rejected:
            if rejection.blamed:
                self._weights.inner.pop(rejection.worker, None)  # It begins anew, and so would its successor.
        accepted = {one.worker for one in verdict.accepted}
        for source, refs in zip(command.sources, taken, strict=True):
            if source.worker in accepted and len(refs) > fragments:
                self._weights.inner[source.worker] = refs[fragments]
        self._inbox.put_nowait(c.Reduced(verdict))

    async def _persist(self, saving: Awaitable[Saved]) -> None:
        saved = await saving
        failpoint("scheduler.after_commit")
        self._staffing.begun = True
        commit = saved.commit
        fields = {"round": commit.round, "theta_sha256": commit.theta_sha256, "epoch": commit.epoch}
        self._unwritten.append({**fields, "deltas": len(commit.deltas)})
        if saved.written:  # Rounds before it that a full disk had refused are written with it.
            for written in self._unwritten:
                self._telemetry.note("commit", **written)
            self._unwritten.clear()
        self._inbox.put_nowait(c.Committed(saved))

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _finish(self) -> dict[str, Any]:
        self._costs.bill()
        return await self._telemetry.finish({"parameter_bytes": self._weights.bytes, "attempt": self._attempt})

    async def _settling(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the news of the time in which the run settles; a status line first if that takes long."""
        ending = asyncio.ensure_future(self._settled())
        if not (await asyncio.wait({ending}, timeout=NEWS_S))[0]:
            yield [_status("writing the last checkpoint")]
        async for records in self._due_until(ending):
            yield records
        yield self._telemetry.for_driver(everything=True)
        await ending

    async def _settled(self) -> None:
        """Wait for commits, for workers with a final plan, and for the mirror."""
        await asyncio.gather(*self._commits, self._dispatcher.part())
        await self._copied()

    async def _copied(self, error: BaseException | None = None) -> None:
        """Wait until the mirror has all commits, unless it hangs or the run is ended by force."""
        if self._job.checkpoint.mirror is None or self._commits or not isinstance(error, HyphaError | None):
            return
        with suppress(RayError, HyphaError):
            problem = await (await self._actors.store.ask(lambda store: store.settle.remote()))
            if problem is not None:
                self._telemetry.problem(problem)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _committed(self, commit: asyncio.Task[None]) -> None:
        if not commit.cancelled() and commit.exception() is None:
            self._commits.discard(commit)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._inbox.put_nowait(c.SchedulerFailed(_meant(getattr(error, "cause", None) or error)))


def _meant(error: Exception) -> Exception:
    """Error as the run ends with it: a lost object, which no repeated call brings back, is a `LostError`."""
    if not isinstance(error, GONE):
        return error
    what = "an object of the run is lost with its node"
    got = first_line(error)
    return LostError("NET012", what, got=got, fix="submit again: the run goes on from its last commit")


def _raise_what_ended(commands: Sequence[c.Command]) -> None:
    """Raise the error that has ended the run, if any."""
    for command in commands:
        if isinstance(command, c.Finish) and command.error is not None:
            raise command.error


def _status(text: str) -> dict[str, Any]:
    return {"kind": "status", "text": text}
