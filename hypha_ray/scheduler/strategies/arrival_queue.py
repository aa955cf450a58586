"""Deltas on their way into the weights, where there is no barrier: they arrive, are reduced, and are answered."""

from __future__ import annotations

from collections import deque

from hypha_ray.config import Job
from hypha_ray.scheduler.messages import Reduce
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.rounds.async_round import AsyncRound, ReceivedDelta
from hypha_ray.scheduler.rounds.metrics import counted, weight
from hypha_ray.types import Contribution, Rejection, RoundProgress, Verdict, WeightsVersion

PATIENCE = 10
"""Rounds of merged deltas by which a worker may be behind, unless the job says otherwise."""
REMEMBERED = 4
"""Commits whose versions are kept."""


class ArrivalQueue:
    """Counts versions of the weights, and knows the age of those that each delta was trained from.

    Args:
        job: the job file.
        size: deltas that make a round.
        past: what the run goes on from.

    """

    def __init__(self, job: Job, size: int, past: ResumePoint) -> None:
        self._sync, self._target = job.sync, job.rounds.samples_between_updates
        self._patience = PATIENCE * size if job.sync.max_staleness is None else job.sync.max_staleness
        self._size = size
        self.version = WeightsVersion(int(past.state.get("step", 0)))
        """Version of the newest weights: number of reductions in the run."""
        self.merged = int(past.state.get("merged", 0))
        """Deltas of the run that are in them."""
        self.commits = {self.version: past.next_round - 1}
        """Rounds of the last commits, by the versions of their weights."""
        self.arrived: dict[int, ReceivedDelta] = {}
        self.reducing: dict[int, ReceivedDelta] = {}
        self.samples = 0
        """Samples behind all deltas on their way."""
        self._unaged: set[int] = set()
        """Workers whose deltas came since the last look at their age; others are reduced before they age."""
        self._norms: deque[float] = deque(maxlen=2 * size)
        self._in_vain = 0

    def holds(self, worker: int) -> bool:
        """Whether a number has a delta on its way: which of its samples are used is open."""
        return worker in self.arrived or worker in self.reducing

    def receive(self, arrival: ReceivedDelta) -> None:
        """Take in a delta that has come."""
        worker = arrival.delta.source.worker
        self.arrived[worker] = arrival
        self.samples += arrival.delta.samples
        self._unaged.add(worker)

    def discard(self, worker: int) -> None:
        """Leave out a delta that has come."""
        self.samples -= self.arrived.pop(worker).delta.samples
        self._unaged.discard(worker)

    def clear(self) -> None:
        """Leave out all deltas that have come."""
        for worker in list(self.arrived):
            self.discard(worker)

    @property
    def hopeless(self) -> bool:
        """Whether a round's worth of deltas was rejected for what they were, and none accepted."""
        return self._in_vain >= self._size

    @property
    def committed(self) -> bool:
        """Whether the newest weights are."""
        return self.version in self.commits

    def commit(self, round: int) -> None:
        """The newest weights are those of a commit."""
        self.commits[self.version] = round
        for old in sorted(self.commits)[:-REMEMBERED]:
            del self.commits[old]

    def state(self) -> dict[str, int]:
        """State for a later scheduler, as plain JSON."""
        return {"step": self.version, "merged": self.merged}

    def drop_stale(self) -> list[Rejection]:
        """Drop what was trained from weights that are too old."""
        ages = {worker: self._staleness(self.arrived[worker]) for worker in self._unaged}
        self._unaged.clear()
        old = {worker: age for worker, age in ages.items() if age > self._patience}
        for worker in old:
            self.discard(worker)
        text = "{} deltas were merged since its weights, more than {}"
        return [Rejection(worker, text.format(age, self._patience)) for worker, age in sorted(old.items())]

    def reduce(self, current: AsyncRound, since: int | None) -> Reduce:
        """Have all reduced that has arrived, in the order of worker numbers.

        Args:
            current: the round that they will be in.
            since: oldest version that a worker still trains from; None: no worker trains.

        """
        self.reducing, self.arrived = dict(sorted(self.arrived.items())), {}
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
        """Whether a verdict is that on the deltas that are being reduced."""
        return bool(self.reducing) and verdict.round == self.version

    def take_verdict(self, verdict: Verdict) -> list[tuple[Contribution, ReceivedDelta, int]]:
        """Make a step; returns the accepted deltas with their staleness."""
        batch, self.reducing = self.reducing, {}
        arrivals = [(one, batch[one.worker]) for one in verdict.accepted]
        taken = [(counted(one, arrival.delta), arrival, self._staleness(arrival)) for one, arrival in arrivals]
        self.samples -= sum(arrival.delta.samples for arrival in batch.values())
        self.version = WeightsVersion(self.version + 1)
        self.merged += len(taken)
        self._norms.extend(one.norm for one in verdict.accepted)
        self._in_vain = 0 if taken else self._in_vain + sum(one.blamed for one in verdict.rejected)
        return taken

    def _staleness(self, arrival: ReceivedDelta) -> int:
        """Deltas that were merged since the weights that one was trained from."""
        return self.merged - arrival.turn.merged
