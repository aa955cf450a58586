"""What the scheduler's brain asks for, and what it hears besides the workers' own events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypha_ray.types import Event, Plan, Source, Span, Verdict


@dataclass(frozen=True, slots=True)
class Feed:
    """Send a slice's bytes to a worker."""

    worker: int
    slice: int


@dataclass(frozen=True, slots=True)
class Assign:
    """Give a worker its plan, or a corrected version of it."""

    worker: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Merge:
    """Send a worker the global weights with which a round starts."""

    worker: int
    round: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Let the server make one step of these workers' deltas; `samples` are their weights."""

    round: int
    sources: tuple[Source, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Persist:
    """Write snapshot and commit record of a round, in the background."""

    round: int
    verdict: Verdict
    spans: tuple[tuple[int, tuple[Span, ...]], ...]
    cursors: Mapping[int, int]
    epoch: int
    ahead: Mapping[int, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End a worker and its lease."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """A line for metrics.jsonl, the console and the other sinks."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Note:
    """A line for events.jsonl."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: done, or ended by an error."""

    error: Exception | None = None


Command: TypeAlias = Feed | Assign | Merge | Reduce | Persist | Dismiss | Record | Note | Finish


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker's stream broke: its process or node is gone."""

    source: Source
    reason: str


@dataclass(frozen=True, slots=True)
class Reduced:
    """The server's answer to a `Reduce`."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened until the core's deadline."""


Input: TypeAlias = Event | Lost | Reduced | Tick
