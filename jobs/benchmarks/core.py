"""CPU time of the scheduler's core per event, with 100 to 10 000 virtual workers, with and without a barrier."""

from __future__ import annotations

import heapq
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.planning.round_planner import Sizes
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.types import (
    Alive,
    Commit,
    Contribution,
    Delta,
    Event,
    Merged,
    Plan,
    Ready,
    Report,
    Saved,
    SliceInfo,
    Source,
    Verdict,
    window,
)

FLEETS = (100, 1000, 10_000)
ROUNDS = 3
BATCH = 8
BATCHES = 10
"""Batches of an average worker in a round."""
SPREAD_S = (0.5, 2.0)
"""Seconds per batch of the fastest and the slowest worker."""
SLICE = 1024
ROWS = (
    "core",
    *(f"core_{kind}_{workers}" for kind in ("barrier", "async") for workers in FLEETS),
)


class Worker:
    """A worker that trains as planned, and reports as often as the job says."""

    def __init__(self, source: Source, batch_s: float) -> None:
        self.source, self.batch_s = source, batch_s
        self.plan: Plan | None = None
        self.longest: Plan | None = None
        self.version = -1
        self.done = self.reported = 0
        self.reported_at = 0.0

    def follow(self, plan: Plan) -> None:
        """Take a plan; spans that a later version cuts off stay known."""
        longest = self.longest
        if longest is None or longest.round != plan.round or plan.samples > longest.samples:
            self.longest = plan
        self.plan = plan


class Fleet:
    """Virtual workers, a server and a store on a virtual clock around the core, whose CPU time is taken."""

    def __init__(self, workers: int, strategy: str) -> None:
        dice, samples = random.Random(workers), workers * BATCH * BATCHES
        tables: dict[str, Any] = {
            "run": {"name": "bench"},
            "rounds": {"update_rounds": ROUNDS, "samples_between_updates": samples, "max_batch_size": BATCH},
            "resources": {"num_workers": workers, "min_workers": workers // 2, "start_deadline_s": 600.0},
            "sync": {"strategy": strategy},
        }
        self.job = Job.model_validate(tables | {"rounds": tables["rounds"] | {"evaluate_every": 0}})
        slices = [SliceInfo(index, "", "", SLICE) for index in range(max(20, 3 * samples // SLICE))]
        self._core = SchedulerCore(self.job, "bench", slices, Sizes(10_000), ResumePoint())
        self._speeds = [dice.uniform(*SPREAD_S) for _ in range(workers)]
        self._workers: dict[int, Worker] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._now = count(), 0.0
        self.over = False
        self.lost = self.events = 0
        self.committed_at_cpu_s: list[float] = []
        self.cpu_s = 0.0

    def run(self) -> Fleet:
        """Go through all rounds."""
        for command in self._core.start(self.job.resources.num_workers, self._now):
            self._perform(command)
        self._at(0.05, c.Initialised(1000, "theta", "layout"))
        while not self.over:
            if not self._queue or self._queue[0][0] > self._core.deadline:
                self._now = max(self._now, self._core.deadline)
                self._tell(c.Tick())
            else:
                self._now, _, action = heapq.heappop(self._queue)
                action()
        return self

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now + seconds, next(self._order), action))

    def _at(self, seconds: float, event: c.Input) -> None:
        self._later(seconds, lambda: self._tell(event))

    def _tell(self, event: c.Input) -> None:
        began = time.thread_time()
        if isinstance(event, Event):
            self._core.arrived(event, self._now)
        commands = self._core.handle(event, self._now)
        self.cpu_s += time.thread_time() - began
        self.events += 1
        for command in commands:
            self._perform(command)

    def _perform(self, command: c.Command) -> None:
        match command:
            case c.Hire(source=source):
                self._later(0.1, lambda: self._start(source))
            case c.Assign(worker=number, plan=plan):
                worker = self._workers[number]
                worker.follow(plan)
                if worker.version == plan.round and not worker.done and plan.spans and plan.version:
                    self._train(worker, plan.round)
            case c.Merge(worker=number, round=version):
                self._later(0.01, lambda: self._merge(self._workers[number], version))
            case c.Reduce():
                accepted = tuple(
                    Contribution(source.worker, source.incarnation, weight, 1.0)
                    for source, weight in zip(command.sources, command.weights, strict=True)
                )
                self._at(0.05, c.Reduced(Verdict(command.round, accepted, (), 0.5)))
            case c.Persist(round=number, verdict=verdict, spans=spans):
                self.committed_at_cpu_s.append(self.cpu_s)
                commit = Commit(number, None, f"theta-{number}", "", verdict.accepted, spans, {}, 0, {}, ())
                self._at(0.5, c.Committed(Saved(commit)))
            case c.LogEvent(fields=fields):
                self.lost += fields["kind"] == "loss"
            case c.Finish():
                self.over = True

    def _start(self, source: Source) -> None:
        worker = self._workers[source.worker] = Worker(source, self._speeds[source.worker])
        self._tell(Ready(source, -1, "layout", "cpu", 1))
        self._pulse(worker)

    def _pulse(self, worker: Worker) -> None:
        self._tell(Alive(worker.source, -1))
        self._later(self.job.lease_s / 4, lambda: self._pulse(worker))

    def _merge(self, worker: Worker, version: int) -> None:
        worker.version, worker.done, worker.reported, worker.reported_at = version, 0, 0, self._now
        self._tell(Merged(worker.source, version, 0.01))
        if worker.plan is not None and worker.plan.spans:
            self._train(worker, version)

    def _train(self, worker: Worker, version: int) -> None:
        self._later(worker.batch_s, lambda: self._batch(worker, version))

    def _batch(self, worker: Worker, version: int) -> None:
        if worker.plan is None or worker.plan.round != version or worker.version != version:
            return
        worker.done += min(BATCH, max(1, worker.plan.samples - worker.done))
        last = worker.done >= worker.plan.samples
        if last or self._now - worker.reported_at >= self.job.report_interval_s:
            self._report(worker, version)
        if worker.done < worker.plan.samples:
            self._train(worker, version)
        else:
            self._deliver(worker, version)

    def _report(self, worker: Worker, version: int) -> None:
        samples, worker.reported = worker.done - worker.reported, worker.done
        batches = -(-samples // BATCH)
        worker.reported_at = self._now
        seconds = batches * worker.batch_s
        figures = (batches, samples, samples, samples, 3.0, seconds, batches, 0.0, 1e-3)
        self._tell(Report(worker.source, version, *figures))

    def _deliver(self, worker: Worker, version: int) -> None:
        assert worker.longest is not None
        done = worker.done
        spans = window(worker.longest.spans, 0, done)
        figures = (done, done, done, -(-done // BATCH), 3.0, 1, 1000, 1.0, 0.0)
        self._at(0.02, Delta(worker.source, version, spans, *figures))


def core() -> dict[str, dict[str, Any]]:
    """CPU time of the core per event in µs, for fleets without faults, each in a process of its own."""
    rows: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for kind in ("barrier", "async"):
            for workers in FLEETS:
                rows[f"core_{kind}_{workers}"] = processes.submit(_row, kind, workers).result()
    growth = {
        f"growth_{kind}": rows[f"core_{kind}_{FLEETS[-1]}"]["value"] / rows[f"core_{kind}_{FLEETS[0]}"]["value"]
        for kind in ("barrier", "async")
    }
    return {"core": {"value": max(row["value"] for row in rows.values()), "target": "<= 60", **growth}} | rows


def _row(kind: str, workers: int) -> dict[str, Any]:
    fleet = Fleet(workers, "async" if kind == "async" else "diloco").run()
    first, *_, last = fleet.committed_at_cpu_s
    return {
        "value": 1e6 * fleet.cpu_s / fleet.events,
        "target": "<= 60",
        "events": fleet.events,
        "cpu_s_per_round": round((last - first) / (ROUNDS - 1), 3),
        "report_interval_s": fleet.job.report_interval_s,
        "lost": fleet.lost,
        "rss_mib": _peak_mib(),
    }


def _peak_mib() -> int:
    """Most memory that this process has had; `getrusage` would count its parent's, too."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) // 1024
