"""Results of a round: the server's verdict, and the record in the commit log."""

from __future__ import annotations

from dataclasses import dataclass

from hypha_ray.types.data import Span


@dataclass(frozen=True, slots=True)
class Contribution:
    """A delta that went into a round, as the server saw it, with its L2 norm over all fragments that it has."""

    worker: int
    incarnation: int
    samples: int
    norm: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """A delta that did not go into a round, and why; no worker is to blame for one that got lost."""

    worker: int
    reason: str
    blamed: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a round at the server; the L2 norm of the change of θ, and its bytes if that is sent down."""

    round: int
    accepted: tuple[Contribution, ...]
    rejected: tuple[Rejection, ...]
    update_norm: float
    coded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """One outer round in the commit log, the only truth about a run.

    `cursors` maps a slice to its samples used in `epoch`, the oldest incomplete epoch; `ahead` holds the same
    for newer epochs that have begun. Hashes are sha256 of the snapshot files, as `sha256sum` prints them.
    """

    round: int
    parent_sha256: str | None
    theta_sha256: str
    outer_sha256: str
    deltas: tuple[Contribution, ...]
    spans: tuple[tuple[int, tuple[Span, ...]], ...]
    cursors: dict[int, int]
    epoch: int
    ahead: dict[int, dict[int, int]]
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """Result of writing a round: its record, and the reason of anything that could not be written yet.

    `written` tells whether the record is on the disk, and with it all before it.
    """

    commit: Commit
    problem: str | None = None
    written: bool = True
