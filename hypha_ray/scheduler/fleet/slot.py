"""A numbered place of the fleet, which one worker after the other has."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypha_ray.market.leases import Lease
from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.types import Source


@dataclass(slots=True)
class Slot:
    """A worker's number, and the worker that has it."""

    number: int
    source: Source | None = None
    """Source of the worker that is starting or at work."""
    member: WorkerState | None = None
    """Once it is at work; stays there for its successor to learn from."""
    lease: Lease | None = None
    leaving: bool = False
    starts: int = 0
    failures: int = 0
    """Workers in a row that went without having contributed anything."""
    breakdowns: int = 0
    """Number of these whose process ended by itself."""
    exceptions: set[str | None] = field(default_factory=set)
    """Exception that ended them; None: no exception."""
    strikes: int = 0
    """Deltas that were rejected for what they were, less those that were accepted since."""
    excluded: bool = False
    done: bool = False
    """It has done its final plan."""
    progress_at: float = 0.0
    """Time when the worker was hired, was first heard of, or last made progress."""
    retry_at: float | None = None

    @property
    def working(self) -> bool:
        """At work, and wanted further."""
        return self.lease is not None and not self.leaving

    def due(self, now: float) -> bool:
        """Whether a worker is to be hired."""
        wanted = self.source is None and not self.excluded and not self.done
        return wanted and self.retry_at is not None and now >= self.retry_at
