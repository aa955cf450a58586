"""CPU time of the scheduler's core per event, with 100 to 10 000 virtual workers, with and without a barrier."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore, search_less_often
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.scheduler.worker_plans import Sizes
from hypha_ray.simulation.world import VirtualClock, WallClock, World
from hypha_ray.types import SliceInfo, Source

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
    "core_wall_clock",
)
WALL_CLOCK_WORKERS = 1000


class Fleet(World):
    """Virtual workers without faults, around a core whose CPU time is taken."""

    def __init__(self, workers: int, strategy: str, clock: VirtualClock | None = None) -> None:
        search_less_often(workers)
        dice = random.Random(workers)
        samples = workers * BATCH * BATCHES
        rounds = {"update_rounds": ROUNDS, "samples_between_updates": samples, "max_batch_size": BATCH}
        tables: dict[str, Any] = {
            "run": {"name": "bench"},
            "rounds": rounds | {"evaluate_every": 0},
            "resources": {"num_workers": workers, "min_workers": workers // 2, "start_deadline_s": 600.0},
            "sync": {"strategy": strategy},
        }
        super().__init__(Job.model_validate(tables), clock)
        self._speeds = [dice.uniform(*SPREAD_S) for _ in range(workers)]
        self.lost = self.events = 0
        self.committed_at_cpu_s: list[float] = []
        self.cpu_s = 0.0
        slices = [SliceInfo(index, "", "", SLICE) for index in range(max(20, 3 * samples // SLICE))]
        core = SchedulerCore(self.job, "bench", slices, Sizes(10_000), ResumePoint())
        self.begin(core, ResumePoint(), c.Initialised(1000, "theta", "layout"), 0.05, workers)

    def batch_s(self, source: Source) -> float:
        """Time of each batch of a worker."""
        return self._speeds[source.worker]

    def take_in(self, event: c.Input) -> list[c.Command]:
        """Give the core an event, and take the time of that."""
        began = time.thread_time()
        commands = super().take_in(event)
        self.cpu_s += time.thread_time() - began
        self.events += 1
        return commands

    def obey(self, command: c.Command) -> None:
        """Carry out a command; count commits and losses."""
        super().obey(command)
        match command:
            case c.Persist():
                self.committed_at_cpu_s.append(self.cpu_s)
            case c.LogEvent(fields=fields):
                self.lost += fields["kind"] == "loss"


def core() -> dict[str, dict[str, Any]]:
    """CPU time of the core per event in µs, for fleets without faults, each in a process of its own."""
    rows: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for kind in ("barrier", "async"):
            for workers in FLEETS:
                rows[f"core_{kind}_{workers}"] = processes.submit(_row, kind, workers).result()
        wall_clock = processes.submit(_wall_clock_row).result()
    growth = {}
    for kind in ("barrier", "async"):
        smallest = rows[f"core_{kind}_{FLEETS[0]}"]["value"]
        largest = rows[f"core_{kind}_{FLEETS[-1]}"]["value"]
        growth[f"growth_{kind}"] = largest / smallest
    worst = max(row["value"] for row in rows.values())
    return {"core": {"value": worst, "target": "<= 60", **growth}, **rows, "core_wall_clock": wall_clock}


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


def _wall_clock_row() -> dict[str, Any]:
    """CPU time of the core in a run at the machine's pace, in cores; a worker that seems silent is lost."""
    clock = WallClock()
    fleet = Fleet(WALL_CLOCK_WORKERS, "diloco", clock).run()
    return {
        "value": fleet.cpu_s / fleet.now,
        "target": "<= 0.6",
        "workers": WALL_CLOCK_WORKERS,
        "seconds": round(fleet.now, 1),
        "events": fleet.events,
        "lost": fleet.lost,
        "at_work": len(fleet.core.view().roster.members),
        "latest_s": round(clock.latest_s, 3),
    }


def _peak_mib() -> int:
    """Most memory that this process has had; `getrusage` would count its parent's, too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) // 1024
