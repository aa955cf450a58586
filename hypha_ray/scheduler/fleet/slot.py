"""A numbered place in the fleet, held by one worker at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypha_ray.market.leases import Lease
from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.types import Source


@dataclass(slots=True)
class Slot:
    """A worker's number, its present worker, and its history."""

    number: int
    source: Source | None = None
    """Source of the worker that is starting or at work."""
    member: WorkerState | None = None
    """State of the present or the last worker, whose batch times its successor inherits; None before the first."""
    lease: Lease | None = None
    leaving: bool = False
    starts: int = 0
    failures: int = 0
    """Workers in a row that ended without a contribution."""
    breakdowns: int = 0
    """Number of these that crashed."""
    exceptions: set[str | None] = field(default_factory=set)
    """Exceptions that ended them; None stands for a crash without one."""
    work: str = ""
    """Work that the worker told of last; empty if none."""
    machine: str = ""
    """Machine that it told of last; empty if none."""
    strikes: int = 0
    """Number of deltas rejected for their content, less those accepted since."""
    excluded: bool = False
    done: bool = False
    """Whether the worker has done its final plan."""
    progress_at: float = 0.0
    """Time at which the worker was hired, became ready, or last made progress."""
    retry_at: float | None = None

    @property
    def working(self) -> bool:
        """Whether the worker is at work and not leaving."""
        return self.lease is not None and not self.leaving

    def due(self, now: float) -> bool:
        """Whether a worker is to be hired."""
        wanted = self.source is None and not self.excluded and not self.done
        return wanted and self.retry_at is not None and now >= self.retry_at
