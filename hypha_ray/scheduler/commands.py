"""What the scheduler's brain asks for, and what it hears besides the workers' own events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hypha_ray.phases import Phase
from hypha_ray.types import Event, Plan, Saved, Source, Span, Verdict

Used: TypeAlias = tuple[tuple[int, tuple[Span, ...]], ...]
"""What each worker's accepted deltas were trained on."""


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
    whole: bool = True
    """All of them, in the place of its own; or else what the round before has changed."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Send a worker the inner state with which its predecessor ended the last committed round."""

    worker: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Let the server make one step of these workers' deltas, with these weights in the mean."""

    round: int
    sources: tuple[Source, ...]
    weights: tuple[int, ...]
    rounds: tuple[int, ...] = ()
    """Those that the deltas are of; none named: they are all of this one."""
    since: int | None = None
    """Deltas of earlier rounds are of no use any more; None: nor are others of this one."""
    phase: Phase | None = None
    """What the step is, where rounds have several."""


@dataclass(frozen=True, slots=True)
class Persist:
    """Write snapshot and commit record of a round, in the background."""

    round: int
    verdict: Verdict
    spans: Used
    cursors: Mapping[int, int]
    epoch: int
    ahead: Mapping[int, Mapping[int, int]]
    state: Mapping[str, Any] = field(default_factory=dict)
    """What a scheduler that takes over needs beside the log: totals, statistics, strikes; plain JSON."""


@dataclass(frozen=True, slots=True)
class Hire:
    """Lease a machine and start a worker there, under this number and incarnation; this takes its time."""

    source: Source


@dataclass(frozen=True, slots=True)
class Retire:
    """Ask a worker to hand over what it has and to leave, because its machine goes away."""

    worker: int
    reason: str


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


Command: TypeAlias = (
    Feed | Assign | Merge | Restore | Reduce | Persist | Hire | Retire | Dismiss | Record | Note | Finish
)


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker's stream broke: its process or node is gone."""

    source: Source
    reason: str
    exception: str | None = None
    """Kind and text of the exception that ended its inner loop; None: something else did."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No machine could be had for a worker that was to be hired."""

    source: Source
    reason: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The machines of these workers are about to go away."""

    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The store's answer to a `Persist`."""

    saved: Saved


@dataclass(frozen=True, slots=True)
class Initialised:
    """The weights that the run begins or goes on with are there; hashes of them and of the model's layout."""

    theta_bytes: int
    theta_sha256: str
    layout_sha256: str
    part_bytes: tuple[int, ...] = ()
    """Of each fragment; empty: there is one."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The server's answer to a `Reduce`."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened until the core's deadline."""


Input: TypeAlias = Event | Lost | Unplaced | Draining | Initialised | Reduced | Committed | Tick
