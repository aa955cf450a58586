"""The most that the head's link carries in a second: with all weights exchanged at once, and with fragments in turn.

The link is wide enough for both, so what is measured is what training asks for, and not what it gets.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.wide_area.links import Link, Site, missing
from benchmarks.wide_area.nodes import Cluster, flags, linked
from benchmarks.wide_area.overlap import WORKERS, job_flags
from hypha_ray.telemetry.sinks.files import EVENTS, read_jsonl

LINK = Link(mbit_s=1000)
FRAGMENTS = 4
BATCHES = 30
"""Batches of a worker in a round, which lasts a good deal longer than `WINDOW_S`: no window has two exchanges in it."""
ROUNDS = 10
WINDOW_S = 1.0
EVERY_S = 0.1
"""Time that peaks are sums over, and the time between two looks at the counters."""
TIMEOUT_S = 200.0
Counted = Sequence[tuple[float, int]]
"""Seconds of the wall clock, and all bytes up to then."""


def peak() -> dict[str, dict[str, Any]]:
    """Most bytes in a second with fragments that take turns ÷ those without fragments; rounds are equally long."""
    if reason := missing():
        print(f"peak_bytes: skipped, {reason}", file=sys.stderr)
        return {}
    with linked(LINK, WORKERS, seq_len=32) as (cluster, dataset):
        whole, parts = (_peak(cluster, dataset, fragments) for fragments in (1, FRAGMENTS))
    conditions = {"mbit_s": LINK.mbit_s, "workers": WORKERS, "fragments": FRAGMENTS, "window_s": WINDOW_S}
    target = f"<= {1.25 / FRAGMENTS:.2f}"
    figures = {"bytes_per_s": parts, "bytes_per_s_without": whole}
    return {"peak_bytes": {"value": parts / whole, "target": target, **figures, **conditions, "rounds": ROUNDS}}


def most(counted: Counted, began: float, ended: float) -> int:
    """Most bytes in a window of `WINDOW_S`, of those windows that lie between two times."""
    times = [at for at, _ in counted]
    first = bisect_left(times, began)
    last = bisect_left(times, ended)
    most_bytes = 0
    for start in range(first, last):
        end = bisect_left(times, times[start] + WINDOW_S, hi=last)
        if end < last:
            moved_bytes = counted[end][1] - counted[start][1]
            most_bytes = max(most_bytes, moved_bytes)
    return most_bytes


def _peak(cluster: Cluster, dataset: Path, fragments: int) -> int:
    """Most bytes in a second, from the first commit to the one before the last: then all fragments go at once."""
    name = f"peak-{fragments}"
    rounds = {"update_rounds": ROUNDS, "samples_between_updates": WORKERS * BATCHES}
    round_flags = flags({"rounds": rounds, "sync": {"fragments": fragments}})
    with _counting(cluster.sites[0]) as counted:
        cluster.job(name, [*job_flags(dataset), *round_flags], TIMEOUT_S)
    commits = read_jsonl(cluster.folder / "runs" / name / EVENTS, ["commit"])
    times = {event["round"]: datetime.fromisoformat(event["wall_time"]).timestamp() for event in commits}
    return most(counted, times[0], times[ROUNDS - 2])


@contextmanager
def _counting(site: Site) -> Iterator[list[tuple[float, int]]]:
    """Read a site's counters all the while."""
    counted: list[tuple[float, int]] = []
    enough = Event()

    def count() -> None:
        while not enough.wait(EVERY_S):
            counted.append((time.time(), sum(site.bytes())))

    thread = Thread(target=count, name="counts bytes")
    thread.start()
    try:
        yield counted
    finally:
        enough.set()
        thread.join()
