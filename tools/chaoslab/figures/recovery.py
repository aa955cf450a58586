"""Time from a kill to the next progress, as read from the run's files alone.

| killed | progress is |
|---|---|
| worker, node | the next `step` record of that worker's number, once an event tells of a newer incarnation |
| scheduler, driver | the next `step` record of any worker, once an event tells of a newer attempt |
| server, shard, store, telemetry | the next commit |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

_NEW_WORKER = frozenset({"hire", "lease", "join"})


@dataclass(frozen=True, slots=True)
class Seen:
    """A line of one of the run's files, and when it was first seen, in monotonic seconds."""

    at_s: float
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kill:
    """A strike that hit a process."""

    at_s: float
    role: str
    name: str
    signal: str
    pid: int
    worker: int | None = None
    """Number of the worker that was killed, itself or with its node."""
    after: int = 0
    """The newest incarnation of that worker, or the newest attempt, that was known then."""


def newest(events: Sequence[Seen], role: str, worker: int | None) -> int:
    """Number that a successor has to exceed: an incarnation of the worker, or an attempt; 0 for other roles."""
    newest_number = 0
    for event in events:
        number = _generation(event, role, worker)
        if number is not None:
            newest_number = max(newest_number, number)
    return newest_number


def progress_at(kill: Kill, steps: Sequence[Seen], events: Sequence[Seen], commits: Sequence[float]) -> float | None:
    """Monotonic seconds at which work continued after a kill; None: not yet.

    Args:
        kill: what happened.
        steps: records of kind ``step``.
        events: lines of events.jsonl.
        commits: times of commits.

    """
    if kill.role in ("server", "shard", "store", "telemetry"):
        return min((at_s for at_s in commits if at_s > kill.at_s), default=None)
    successor_s = inf
    for event in events:
        number = _generation(event, kill.role, kill.worker) or 0
        if event.at_s > kill.at_s and number > kill.after:
            successor_s = min(successor_s, event.at_s)
    times_s = []
    for step in steps:
        is_of_worker = kill.worker is None or step.record.get("worker") == kill.worker
        if is_of_worker and step.at_s >= successor_s:
            times_s.append(step.at_s)
    return min(times_s, default=None)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest of the values that is no less than that part of them: never between two of them, never too small."""
    index = ceil(part * len(values)) - 1
    return sorted(values)[max(0, index)]


def figures(seconds: Sequence[float | None]) -> dict[str, float | int | None]:
    """Median, 95th percentile and maximum of what has healed, and how many have not."""
    healed = [value for value in seconds if value is not None]
    row: dict[str, float | int | None] = {"healed": len(healed), "not_healed": len(seconds) - len(healed)}
    for name, part in {"p50_s": 0.5, "p95_s": 0.95, "max_s": 1.0}.items():
        row[name] = round(percentile(healed, part), 2) if healed else None
    return row


def _generation(event: Seen, role: str, worker: int | None) -> int | None:
    """The incarnation or attempt that an event tells of, if it is of the kind that matters."""
    record = event.record
    if role in ("scheduler", "driver") and record.get("kind") == "attempt":
        return int(record["attempt"])
    if worker is not None and record.get("kind") in _NEW_WORKER and record.get("worker") == worker:
        return int(record["incarnation"])
    return None
