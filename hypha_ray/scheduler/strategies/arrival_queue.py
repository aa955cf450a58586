"""Queue of an asynchronous run: deltas that have arrived, and those being reduced."""

from __future__ import annotations

from collections import deque

from hypha_ray.config import Job
from hypha_ray.scheduler.messages import Reduce
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.rounds.async_round import AsyncRound, ReceivedDelta
from hypha_ray.scheduler.rounds.metrics import counted, weight
from hypha_ray.types import Contribution, Rejection, RoundProgress, Verdict, WeightsVersion

PATIENCE = 10
"""Default of `sync.max_staleness`, in rounds of merged deltas."""
REMEMBERED = 4
"""Number of commits whose versions are kept."""


class ArrivalQueue:
    """Counts versions of the weights, and the staleness of each delta.

    Args:
        job: the job file.
        size: number of deltas in a round.
        past: point from which the run resumes.

    """

    def __init__(self, job: Job, size: int, past: ResumePoint) -> None:
        self._sync = job.sync
        self._target = job.rounds.samples_between_updates
        self._patience = PATIENCE * size if job.sync.max_staleness is None else job.sync.max_staleness
        self._size = size
        self.version = WeightsVersion(int(past.state.get("step", 0)))
        """Version of the newest weights: number of reductions in the run."""
        self.merged = int(past.state.get("merged", 0))
        """Number of deltas merged in this run."""
        self.commits = {self.version: past.next_round - 1}
        """Rounds of the last commits, by the versions of their weights."""
        self.arrived: dict[int, ReceivedDelta] = {}
        self.reducing: dict[int, ReceivedDelta] = {}
        self.samples = 0
        """Samples of all queued deltas, including those being reduced."""
        self._unaged: set[int] = set()
        """Workers whose deltas arrived since `drop_stale` last ran; older ones have been checked."""
        self._norms: deque[float] = deque(maxlen=2 * size)
        self._in_vain = 0

    def holds(self, worker: int) -> bool:
        """Whether a worker has a delta in the queue, so that it is undecided which of its samples are used."""
        return worker in self.arrived or worker in self.reducing

    def receive(self, arrival: ReceivedDelta) -> None:
        """Add a delta."""
        worker = arrival.delta.source.worker
        self.arrived[worker] = arrival
        self.samples += arrival.delta.samples
        self._unaged.add(worker)

    def discard(self, worker: int) -> None:
        """Drop a worker's delta that isn't being reduced."""
        self.samples -= self.arrived.pop(worker).delta.samples
        self._unaged.discard(worker)

    def clear(self) -> None:
        """Drop all deltas that aren't being reduced."""
        for worker in list(self.arrived):
            self.discard(worker)

    @property
    def hopeless(self) -> bool:
        """Whether as many deltas as make a round were rejected as invalid, with none accepted between."""
        return self._in_vain >= self._size

    @property
    def committed(self) -> bool:
        """Whether the newest weights are committed."""
        return self.version in self.commits

    def commit(self, round: int) -> None:
        """Record that the newest weights are those of a commit."""
        self.commits[self.version] = round
        for old in sorted(self.commits)[:-REMEMBERED]:
            del self.commits[old]

    def state(self) -> dict[str, int]:
        """State for a later scheduler, as plain JSON."""
        return {"step": self.version, "merged": self.merged}

    def drop_stale(self) -> list[Rejection]:
        """Drop deltas that exceed the staleness limit."""
        ages = {worker: self._staleness(self.arrived[worker]) for worker in self._unaged}
        self._unaged.clear()
        old = {worker: age for worker, age in ages.items() if age > self._patience}
        for worker in old:
            self.discard(worker)
        text = "{} deltas were merged since its weights, more than {}"
        return [Rejection(worker, text.format(age, self._patience)) for worker, age in sorted(old.items())]

    def reduce(self, current: AsyncRound, since: int | None) -> Reduce:
        """Start a reduction of all waiting deltas, in the order of worker numbers.

        Args:
            current: round that they will belong to.
            since: oldest version that a worker still trains from; None: no worker trains.

        """
        self.reducing = dict(sorted(self.arrived.items()))
        self.arrived = {}
        self._unaged.clear()
        deltas = [arrival.delta for arrival in self.reducing.values()]
        unit = self._size if self._sync.weighting == "uniform" else self._target
        return Reduce(
            self.version,
            tuple(delta.source for delta in deltas),
            tuple(weight(self._sync, delta) for delta in deltas),
            tuple(delta.round for delta in deltas),
            self.version if since is None else since,
            RoundProgress(current.number, self._size, unit, len(current.accepted), current.weight, tuple(self._norms)),
        )

    def is_awaited(self, verdict: Verdict) -> bool:
        """Whether a verdict belongs to the reduction in progress."""
        return bool(self.reducing) and verdict.round == self.version

    def take_verdict(self, verdict: Verdict) -> list[tuple[Contribution, ReceivedDelta, int]]:
        """Advance the version; return the accepted deltas with their staleness."""
        batch = self.reducing
        self.reducing = {}
        arrivals = [(one, batch[one.worker]) for one in verdict.accepted]
        taken = [(counted(one, arrival.delta), arrival, self._staleness(arrival)) for one, arrival in arrivals]
        self.samples -= sum(arrival.delta.samples for arrival in batch.values())
        self.version = WeightsVersion(self.version + 1)
        self.merged += len(taken)
        self._norms.extend(one.norm for one in verdict.accepted)
        self._in_vain = 0 if taken else self._in_vain + sum(one.blamed for one in verdict.rejected)
        return taken

    def _staleness(self, arrival: ReceivedDelta) -> int:
        """Number of deltas merged since the weights that a delta was trained from."""
        return self.merged - arrival.local_round.merged
