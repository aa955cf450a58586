"""Traces of the scheduler's core: every command that seeded runs give, with its time, as one hash a run.

Classes and fields are encoded by position, so renaming them changes nothing; texts and keys that users see count.
python -m tests.support.golden writes golden_traces.json anew, which only a change of behaviour that is meant may do.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from hypha_ray.scheduler import messages as c
from tests.support.fleet import Faults, Fleet, job_of, slices_of
from tests.support.walk import Walk

FILE = Path(__file__).with_name("golden_traces.json")

KINDS: tuple[type[c.Command], ...] = (
    c.Feed,
    c.Assign,
    c.Merge,
    c.RestoreInnerState,
    c.Reduce,
    c.Persist,
    c.Hire,
    c.Drain,
    c.Dismiss,
    c.LogMetric,
    c.LogEvent,
    c.Finish,
)
"""A command's number is its place in this list."""

SYNCS: dict[str, dict[str, Any]] = {
    "barrier": {},
    "quorum": {"quorum": 3, "grace_s": 2.0},
    "fragments": {"fragments": 3, "delay_steps": 2},
    "in flight": {"fragments": 3, "in_flight": 2, "delay_steps": 1},
    "async": {"strategy": "async", "period": 5},
    "async, a round of all": {"strategy": "async"},
    "async, equal": {"strategy": "async", "dynamic_local_steps": False, "arrival_grace_s": 0.5},
    "sync": {"strategy": "sync"},
    "replay": {},
}
FLEETS = (3, 17, 64)
WALKS = range(40)


def runs() -> dict[str, Callable[[], str]]:
    """All runs by their names; each returns the hash of its trace."""
    walks = {f"walk {seed}": lambda seed=seed: _walk(seed) for seed in WALKS}
    fleets = {f"{name}, {n} workers": lambda name=name, n=n: _fleet(name, n) for name in SYNCS for n in FLEETS}
    return walks | fleets


class Trace:
    """A hash over commands and their times."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, now: float, command: c.Command) -> None:
        line = json.dumps([now, KINDS.index(type(command)), encoded(command)])
        self._hash.update(line.encode() + b"\n")

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()[:16]


def encoded(value: Any) -> Any:
    """A value as plain JSON; fields by position, and without those at the end that have their defaults."""
    if isinstance(value, BaseException):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        found = list(fields(value))
        while found and found[-1].default is not MISSING and getattr(value, found[-1].name) == found[-1].default:
            found.pop()
        return [encoded(getattr(value, field.name)) for field in found]
    if isinstance(value, Mapping):
        return [[encoded(key), encoded(one)] for key, one in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(encoded, value))
    return [encoded(one) for one in value] if isinstance(value, tuple | list) else value


def _walk(seed: int) -> str:
    trace = Trace()

    class Traced(Walk):
        def obey(self, command: c.Command) -> None:
            trace.add(self.now, command)
            super().obey(command)

    Traced(seed).run()
    return trace.hash


def _fleet(name: str, workers: int) -> str:
    """Rounds of a fleet of unlike speeds in which workers die, hang, leave, slow down and are rejected."""
    rng = random.Random(f"{name}/{workers}")
    mode = "replay" if name == "replay" else "elastic"
    speeds: list[Any] = [_speed(rng) for _ in range(workers)]
    job = job_of(
        run={"name": "virtual", "mode": mode},
        rounds={"update_rounds": 4, "samples_between_updates": workers * 40, "max_batch_size": 4, "evaluate_every": 2},
        resources={"num_workers": workers, "min_workers": 1, "start_deadline_s": 60.0},
        sync=SYNCS[name],
    )
    doomed = rng.randrange(workers)
    faults = Faults(reject=lambda delta: "NaN" if delta.source.worker == doomed and delta.round == 1 else None)
    fleet, trace = Fleet(job, speeds, slices_of(2 + workers * 3, 40), faults), Trace()
    for number in range(workers):
        for kind in (fleet.kill, fleet.hang, fleet.preempt):
            if rng.random() < 0.1:
                fleet.later(rng.uniform(1.0, 40.0), lambda kind=kind, number=number: _strike(fleet, kind, number))
    fleet.run()
    for now, command in fleet.commands:
        trace.add(now, command)
    return trace.hash


def _speed(rng: random.Random) -> Callable[[float], float]:
    before, after, at = rng.uniform(0.3, 3.0), rng.uniform(0.3, 3.0), rng.uniform(5.0, 60.0)
    return lambda now: before if now < at else after


def _strike(fleet: Fleet, kind: Callable[[int], None], number: int) -> None:
    if number in fleet.workers and fleet.workers[number].alive and not fleet.over:
        kind(number)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: run() for name, run in runs().items()}, indent=1) + "\n", encoding="utf-8")
