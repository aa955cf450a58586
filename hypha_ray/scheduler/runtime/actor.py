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

from hypha_ray import traces
from hypha_ray.children import ListedActor
from hypha_ray.config import Job
from hypha_ray.data.mixture import DATASET, RunDataset, described
from hypha_ray.data.storage import Place
from hypha_ray.errors import ConfigError, HyphaError, LostError, QuarantinedError, first_line
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore, search_less_often
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.scheduler.runtime.global_weights import GlobalWeights
from hypha_ray.scheduler.runtime.market_client import CostBook, SpeedBook, Staffing
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.slice_readers import SliceCache, reader_of
from hypha_ray.scheduler.runtime.supervised_actor import GONE, NodeAttendance, keep_all
from hypha_ray.scheduler.runtime.telemetry_client import RoundTraces, TelemetryClient
from hypha_ray.scheduler.runtime.worker_dispatcher import WorkerDispatcher
from hypha_ray.scheduler.worker_plans import Sizes
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import (
    METRICS,
    by_round,
    read_json,
    read_jsonl,
    rewind,
    since_first_attempt_s,
    uncommitted_s,
)
from hypha_ray.telemetry.sinks.table import duration
from hypha_ray.types import Commit, Event, Saved
from hypha_ray.worker.actor import FromDataset

NEWS_S = 1.0
"""Seconds between two checks for news while machines are awaited, or the last commits are made."""
DRAIN_CHECK_S = 2.0
"""Seconds between two checks for nodes that are drained."""


class Scheduler(ListedActor):
    """Runs one job.

    Args:
        job: the job file.
        run: name of the run.
        directory: the run directory.
        places: place of each dataset; more than one in a mixture.
        attempt: number of this scheduler, over the whole run.
        owner: the actor that starts what outlives this scheduler.
        from_dataset: description of the dataset for workers, as `TrainWorker` takes it.

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
        traces.begin(job.telemetry.sinks, run, ray.get_runtime_context)
        search_less_often(job.num_workers)
        self._job = job
        self._run = run
        self._directory = Path(directory)
        self._attempt = attempt
        self._inbox: asyncio.Queue[c.Input] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._commits: set[asyncio.Task[None]] = set()
        """Commits that the end of the run waits for; a failed one stays, so that its error is raised there."""
        self._unwritten: list[Commit] = []
        """Commits that wait for room on the disk."""
        is_async = not job.sync.traits.has_barrier
        self._telemetry = TelemetryClient(job.num_workers, job.telemetry.alerts, is_async)
        self._actors = RunActors(job, run, directory, owner, self._telemetry.replaced, from_dataset)
        self._telemetry.telemetry = self._actors.telemetry
        self._weights = GlobalWeights(job, self._actors)
        run_dataset = RunDataset.parse(read_json(self._directory / DATASET))
        self._reader = reader_of(places, job, self._actors, self._telemetry.problem, run_dataset)
        self._is_new_dataset = run_dataset.sha256 is None
        self._slice_cache = SliceCache(job, self._actors, self._reader)
        self._staffing = Staffing(job, run, self._actors)
        self._costs = CostBook(self._actors, self._telemetry, self._directory, self._job.goal.is_set)
        self._speeds = SpeedBook(job, run, self._actors)
        self._core: SchedulerCore | None = None
        self._round_traces = RoundTraces(job, attempt)
        self._dispatcher = WorkerDispatcher(
            self._actors,
            self._weights,
            self._slice_cache,
            self._telemetry,
            self._on_worker_event,
            self._spawn,
            self._round_traces,
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
            resume_point = await self._recall()
            building = asyncio.ensure_future(self._build_core(resume_point))
            async for records in self._due_until(building):
                yield records
            core = self._core = await building
            hiring = asyncio.ensure_future(self._staffing.workers_to_hire(resume_point))
            if not await _is_done_soon(hiring):
                yield [_status("waiting for machines; python jobs/market.py shows what others bid")]
            commands = core.start(await hiring, time.monotonic())
            self._spawn(self._initialise(resume_point))
            self._spawn(self._watch_nodes())
            self._spawn(keep_all(self._actors.generators, self._telemetry.problem))
            yield [_status("starting workers and building the model")]
            while True:
                for command in commands:
                    self._perform(command)
                if records := self._telemetry.for_driver(core.over):
                    yield records
                if core.over:
                    _raise_final_error(commands)
                    break
                event = await self._next_event(core.deadline)
                commands = core.handle(event, time.monotonic())
            async for records in self._settle():
                yield records
            summary = await self._finish()
            yield [{"kind": "summary", **summary}]
        except (QuarantinedError, LostError):  # The next scheduler takes the workers over.
            await self._finish()
            raise
        except BaseException as error:
            await self._wait_for_mirror(error)
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
        while not await _is_done_soon(task):
            if records := self._telemetry.for_driver():
                yield records

    async def _since_start_s(self) -> float:
        """Seconds since the run's first start; 0 without a deadline, for which alone they count.

        Raises:
            ConfigError: CFG003, the deadline is over.

        """
        by_s = self._job.goal.by_s
        if by_s is None:
            return 0.0
        since_start_s = await asyncio.to_thread(since_first_attempt_s, self._directory)
        if since_start_s >= by_s:
            problem = f"goal.by = {self._job.goal.by} is over: the run began {duration(since_start_s)} ago"
            raise ConfigError("CFG003", problem, fix="give a later goal.by")
        return since_start_s

    async def _recall(self) -> ResumePoint:
        """Read the point from which the log of an earlier scheduler lets the run go on."""
        since_start_s = await self._since_start_s()
        survey = await (await self._actors.store.ask(lambda store: store.survey.remote()))
        metrics = self._directory / METRICS
        resume_point = ResumePoint(self._attempt, since_start_s=since_start_s)
        if survey is not None:
            quarantined = await (await self._actors.store.ask(lambda store: store.quarantined.remote()))
            used_spans = [span for span in survey.used if span[1] not in quarantined]
            evaluations = by_round(read_jsonl(metrics, kinds=("eval",)), "eval")
            resume_point = ResumePoint(
                attempt=self._attempt,
                next_round=survey.next_round,
                used={"epoch": survey.epoch, "used": used_spans},
                state=survey.state,
                inner=frozenset(survey.inner),
                layout=survey.layout,
                evaluations=tuple(record for record in evaluations if record["round"] < survey.next_round),
                skipped=survey.skipped,
                since_start_s=since_start_s,
                lost_s=await asyncio.to_thread(uncommitted_s, self._directory, survey.state.get("totals", {})),
            )
        await asyncio.to_thread(rewind, metrics, resume_point.next_round)
        await asyncio.to_thread(self._telemetry.recall, self._directory)
        await self._costs.recall()
        self._telemetry.open()
        return resume_point

    async def _build_core(self, resume_point: ResumePoint) -> SchedulerCore:
        manifest = await self._reader.manifest()
        if self._is_new_dataset:
            RunDirectory(self._directory).write(DATASET, described(manifest))
        self._actors.leases.training = self._speeds.open(manifest.shapes)
        prefetched_bytes = self._job.worker.prefetch_mb * 1_000_000
        held_samples = prefetched_bytes // manifest.sample_bytes
        slices = await self._slice_cache.usable(manifest.slices)
        sizes = Sizes(max(1, held_samples), self._slice_cache.nearby)
        return SchedulerCore(self._job, self._run, slices, sizes, resume_point)

    async def _initialise(self, resume_point: ResumePoint) -> None:
        is_resumed = resume_point.next_round > 0
        initialised = await self._weights.initialise(is_resumed, resume_point.layout)
        self._inbox.put_nowait(initialised)
        await self._weights.prepare()

    async def _watch_nodes(self) -> None:
        reported_notices: Mapping[str, str] = {}
        attendance = NodeAttendance()
        while True:
            await asyncio.sleep(DRAIN_CHECK_S)
            with suppress(RayError):  # The control service doesn't answer: the next look will find it.
                nodes = await asyncio.to_thread(ray.nodes)
                workers = await self._actors.workers_by_node()
                for lost_node in attendance.lost(nodes, workers, time.monotonic()):
                    self._telemetry.note("machine_loss", machine=lost_node.name, workers=lost_node.workers)
                leaving = await self._staffing.leaving()
                for worker, reason in leaving.items():
                    self._inbox.put_nowait(c.Draining((worker,), reason))
                if self._job.goal.is_set:
                    self._inbox.put_nowait(await self._staffing.quotes(self._costs.spent))
                notices = self._actors.notices
                for name in notices.keys() - reported_notices.keys():
                    self._telemetry.problem(f"{name} has to leave its machine: {notices[name]}")
                reported_notices = notices
                self._actors.evict()

    # ── events in, commands out ───────────────────────────────────────────────────────────────────────────────────

    def _on_worker_event(self, event: c.Input) -> None:
        """Put an event into the inbox. The worker's lease is renewed now, however late the event is handled."""
        if self._core is not None and isinstance(event, Event):
            self._core.arrived(event, time.monotonic())
            self._speeds.count(event)
        self._inbox.put_nowait(event)

    async def _next_event(self, deadline: float) -> c.Input:
        """Wait for an event until the deadline; a verdict makes the weights of its step the newest ones."""
        timeout_s = max(0.0, deadline - time.monotonic())
        try:
            event = await asyncio.wait_for(self._inbox.get(), timeout_s)
        except TimeoutError:
            return c.Tick()
        self._round_traces.hear(event)
        if isinstance(event, c.Reduced):
            self._weights.advance()
        return event

    def _perform(self, command: c.Command) -> None:
        """Carry a command out."""
        self._round_traces.follow(command)
        match command:
            case c.Hire(source=source):
                self._dispatcher.hire(source)
            case c.LimitLeases(max_price=max_price, firm_only=firm_only):
                self._actors.leases.limit(max_price, firm_only)
            case c.Dismiss(worker=worker):
                self._dispatcher.dismiss(worker)
            case c.Feed() | c.Assign() | c.Merge() | c.RestoreInnerState() | c.Drain():
                self._dispatcher.order(command)
            case c.Reduce():
                self._spawn(self._reduce(command))
            case c.Persist():
                failpoint("scheduler.before_persist")
                saving = self._weights.persist(command)
                commit = self._spawn(self._persist(saving))
                self._commits.add(commit)
                commit.add_done_callback(self._forget_commit)
            case c.LogMetric(fields=fields):
                if fields["kind"] == "round":
                    fields = {**fields, **self._round_fields(fields["round"], fields["samples"])}
                self._telemetry.record(fields)
            case c.LogEvent(fields=fields):
                if fields["kind"] == "plan":
                    assert self._core is not None
                    fields = {**fields, **self._core.plan_reasons(fields["batches"])}
                self._telemetry.event(fields)

    def _round_fields(self, round: int, samples: int) -> dict[str, Any]:
        """Further fields of a round's record: use of the time of fleet and workers, bytes by data node, and cost."""
        self._spawn(self._speeds.publish())
        if (problem := traces.next_problem()) is not None:
            self._telemetry.problem(problem)
        assert self._core is not None
        fields = self._core.time_fields(round, samples)
        if bytes_by_node := self._reader.traffic():
            fields["bytes_from"] = bytes_by_node
        return fields | self._costs.bill()

    async def _reduce(self, command: c.Reduce) -> None:
        failpoint("scheduler.before_reduce")
        payloads = self._dispatcher.payloads(command)
        fragments = len(fragments_of_round(self._job, command.round))
        verdict = await self._weights.reduce(command, [refs[:fragments] for refs in payloads])
        failpoint("scheduler.after_reduce")
        for rejection in verdict.rejected:
            if rejection.blamed:
                self._weights.inner.pop(rejection.worker, None)  # The worker begins anew, and so would its successor.
        accepted_workers = {contribution.worker for contribution in verdict.accepted}
        for source, refs in zip(command.sources, payloads, strict=True):
            if source.worker in accepted_workers and len(refs) > fragments:
                self._weights.inner[source.worker] = refs[fragments]
        self._inbox.put_nowait(c.Reduced(verdict))

    async def _persist(self, saving: Awaitable[Saved]) -> None:
        saved = await saving
        failpoint("scheduler.after_commit")
        self._staffing.begun = True
        commit = saved.commit
        self._round_traces.committed(commit.round)
        self._unwritten.append(commit)
        if saved.written:  # Rounds before it that a full disk had refused are written with it.
            for unwritten in self._unwritten:
                self._telemetry.committed(unwritten)
            self._unwritten.clear()
        self._inbox.put_nowait(c.Committed(saved))

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _finish(self) -> dict[str, Any]:
        self._costs.bill()
        if self._core is not None and self._core.closing_time is not None:
            self._telemetry.note("fleet_time", **self._core.closing_time.fields())
        self._round_traces.end()
        flushing = asyncio.ensure_future(self._actors.flush_traces())
        figures = {"parameter_bytes": self._weights.bytes, "attempt": self._attempt}
        summary = await self._telemetry.finish(figures)
        await flushing
        return summary

    async def _settle(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Wait for the last commits, and yield the news meanwhile; a status line comes first if that takes long."""
        ending_task = asyncio.ensure_future(self._wait_for_commits())
        if not await _is_done_soon(ending_task):
            yield [_status("writing the last checkpoint")]
        async for records in self._due_until(ending_task):
            yield records
        yield self._telemetry.for_driver(everything=True)
        await ending_task

    async def _wait_for_commits(self) -> None:
        """Wait for commits, for workers with a final plan, and for the mirror."""
        await asyncio.gather(*self._commits, self._dispatcher.wait_for_parting())
        await self._wait_for_mirror()

    async def _wait_for_mirror(self, error: BaseException | None = None) -> None:
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
        task.add_done_callback(self._finish_task)
        return task

    def _forget_commit(self, commit: asyncio.Task[None]) -> None:
        if not commit.cancelled() and commit.exception() is None:
            self._commits.discard(commit)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        """Forget a task that has ended; its error ends the run."""
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            cause = getattr(error, "cause", None) or error
            self._inbox.put_nowait(c.SchedulerFailed(_final_error(cause)))


async def _is_done_soon(task: asyncio.Future[Any]) -> bool:
    """Wait until a task is done, for `NEWS_S` seconds at most; return whether it is."""
    done, _ = await asyncio.wait({task}, timeout=NEWS_S)
    return bool(done)


def _final_error(error: Exception) -> Exception:
    """Error as the run ends with it: a lost object, which no repeated call brings back, is a `LostError`."""
    if not isinstance(error, GONE):
        return error
    problem = "an object of the run is lost with its node"
    got = first_line(error)
    return LostError("NET012", problem, got=got, fix="submit again: the run goes on from its last commit")


def _raise_final_error(commands: Sequence[c.Command]) -> None:
    """Raise the error that has ended the run, if any."""
    for command in commands:
        if isinstance(command, c.Finish) and command.error is not None:
            raise command.error


def _status(text: str) -> dict[str, Any]:
    return {"kind": "status", "text": text}
