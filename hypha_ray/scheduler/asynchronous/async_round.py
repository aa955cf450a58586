"""Local rounds of an asynchronous run, the queue of the deltas that they deliver, and the round made of these."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler.messages import Reduce, ResumePoint
from hypha_ray.scheduler.worker_state import WorkerState, weight, with_samples
from hypha_ray.telemetry.round_records import CommitMetrics, RoundMetrics, train_speeds
from hypha_ray.types import Contribution, Delta, Rejection, RoundProgress, Span, Verdict, WeightsVersion

MAX_STALE_ROUNDS = 10
"""Default of `sync.max_staleness`, in rounds of merged deltas."""
KNOWN_COMMITS = 4
"""Number of commits whose versions are kept."""


@dataclass(frozen=True, slots=True)
class LocalRound:
    """Work of a worker between receiving weights and delivering its delta.

    Times in seconds, monotonic.
    """

    version: WeightsVersion
    """Version of the weights."""
    merged: int
    """Number of deltas merged in these weights."""
    began_at: float
    handed_over_at: float | None
    """Time of the worker's delta before this one; None if it had none."""
    evaluating: bool


class LocalRounds:
    """Local rounds in progress, and their reported samples."""

    def __init__(self) -> None:
        self.rounds: dict[int, LocalRound] = {}
        """Local rounds by worker, oldest version first, because each begins from the newest weights."""
        self.reported = 0
        """Samples reported in these rounds."""

    @property
    def oldest_version(self) -> WeightsVersion | None:
        """Oldest version that a worker still trains from; None if no worker trains."""
        for local_round in self.rounds.values():
            return local_round.version
        return None

    def report(self, member: WorkerState, samples: int) -> None:
        """Count samples that a worker has reported, if it trains."""
        if member.source.worker in self.rounds:
            self.reported += samples

    def pop(self, member: WorkerState) -> LocalRound | None:
        """End a worker's local round; None: it has none."""
        ended_round = self.rounds.pop(member.source.worker, None)
        if ended_round is not None:
            self.reported -= member.progress.samples
        return ended_round


@dataclass(frozen=True, slots=True)
class ReceivedDelta:
    """A delivered delta, and the local round that it ends."""

    delta: Delta
    local_round: LocalRound


@dataclass(slots=True)
class AsyncRound:
    """A round without a barrier, which ends after a number of accepted deltas of any workers.

    Its figures are sums over the local rounds that began in it.
    """

    number: int
    started_at: float
    size: int
    """Number of accepted deltas that complete it."""
    figures: RoundMetrics = field(default_factory=RoundMetrics)
    accepted: list[tuple[Contribution, ReceivedDelta, int]] = field(default_factory=list)
    """Accepted deltas in order, with their staleness."""
    rejected: list[Rejection] = field(default_factory=list)
    bytes_up: int = 0
    weight: int = 0
    """Sum of the accepted deltas' weights."""
    samples: int = 0
    """Samples behind the accepted deltas."""
    merges: int = 0
    """Number of local rounds that began after a delta of the same worker."""

    @property
    def whole(self) -> bool:
        """Whether the round is complete."""
        return len(self.accepted) >= self.size

    def accept(self, contribution: Contribution, arrival: ReceivedDelta, staleness: int, weight: int) -> None:
        """Add an accepted delta with its weight in the mean."""
        self.accepted.append((contribution, arrival, staleness))
        self.samples += arrival.delta.samples
        self.weight += weight

    def began(self, worker: int, waited_s: float | None, worked_s: float, sent_bytes: int) -> None:
        """Count a merge; the worker has waited since its last delta, if it had one."""
        figures = self.figures
        figures.bytes_down += sent_bytes
        figures.worked_s[worker] = figures.worked_s.get(worker, 0.0) + worked_s
        if waited_s is not None:
            figures.waited_s[worker] = figures.waited_s.get(worker, 0.0) + waited_s
            self.merges += 1

    def verdict(self, update_norm: float) -> Verdict:
        """Verdict on all of the round's deltas."""
        contributions = tuple(contribution for contribution, _, _ in self.accepted)
        return Verdict(self.number, contributions, tuple(self.rejected), update_norm)

    @property
    def deltas(self) -> tuple[Delta, ...]:
        """Accepted deltas."""
        deltas: list[Delta] = []
        for _, arrival, _ in self.accepted:
            deltas.append(arrival.delta)
        return tuple(deltas)

    @property
    def spans(self) -> tuple[tuple[int, tuple[Span, ...]], ...]:
        """Spans that each worker's deltas were trained on."""
        spans: dict[int, tuple[Span, ...]] = {}
        for contribution, arrival, _ in self.accepted:
            worker = contribution.worker
            spans[worker] = spans.get(worker, ()) + arrival.delta.spans
        return tuple(sorted(spans.items()))


@dataclass(frozen=True, slots=True)
class CommittedAsyncRound:
    """A round whose record waits for the evaluation of the weights before it."""

    round: AsyncRound
    commit: CommitMetrics
    workers: int
    """Number of workers at the end of the round."""
    ended_at: float

    @property
    def number(self) -> int:
        """Number of the round."""
        return self.round.number

    @property
    def merging(self) -> set[int]:
        """Workers whose merge is awaited: none, because each local round begins with the newest weights."""
        return set()

    def record(self, rounds: int, elapsed_s: float, epoch: int) -> dict[str, Any]:
        """Record of the round in a run of so many `rounds`; see docs/telemetry.md."""
        done_round = self.round
        deltas: list[Delta] = []
        staleness: list[int] = []
        batches: Counter[int] = Counter()
        for _, arrival, stale in done_round.accepted:
            deltas.append(arrival.delta)
            staleness.append(stale)
            batches[arrival.delta.source.worker] += arrival.delta.batches
        time_s = self.ended_at - done_round.started_at
        waited_s = sum(done_round.figures.waited_s.values())
        return {
            **done_round.figures.record(self.commit, deltas, time_s, rounds, elapsed_s),
            "finish_s": time_s,
            "predicted_s": None,
            "plan_error": None,
            **train_speeds(deltas),
            "workers": self.workers,
            "batches": dict(sorted(batches.items())),
            "bytes_up": done_round.bytes_up,
            "sync_s": waited_s / max(1, done_round.merges),
            "rejected": len(done_round.rejected),
            "arrivals": len(deltas),
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "epoch": epoch,
        }


class ArrivalQueue:
    """Counts versions of the weights, and the staleness of each delta; `size` deltas make a round."""

    def __init__(self, job: Job, round_deltas: int, resume_point: ResumePoint) -> None:
        self._sync = job.sync
        self._target = job.rounds.samples_between_updates
        default_staleness = MAX_STALE_ROUNDS * round_deltas
        self._max_staleness = default_staleness if job.sync.max_staleness is None else job.sync.max_staleness
        self._size = round_deltas
        self.version = WeightsVersion(int(resume_point.state.get("step", 0)))
        """Version of the newest weights: number of reductions in the run."""
        self.merged = int(resume_point.state.get("merged", 0))
        """Number of deltas merged in this run."""
        self.commits = {self.version: resume_point.next_round - 1}
        """Rounds of the last commits, by the versions of their weights."""
        self.arrived: dict[int, ReceivedDelta] = {}
        self.reducing: dict[int, ReceivedDelta] = {}
        self.samples = 0
        """Samples of all queued deltas, including those being reduced."""
        self._unaged: set[int] = set()
        """Workers whose deltas arrived since `drop_stale` last ran; older ones have been checked."""
        self._norms: deque[float] = deque(maxlen=2 * round_deltas)
        self._rejected_in_a_row = 0
        """Number of deltas rejected as invalid since the last accepted one."""

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
        return self._rejected_in_a_row >= self._size

    @property
    def committed(self) -> bool:
        """Whether the newest weights are committed."""
        return self.version in self.commits

    def commit(self, round: int) -> None:
        """Record that the newest weights are those of a commit."""
        self.commits[self.version] = round
        for old_version in sorted(self.commits)[:-KNOWN_COMMITS]:
            del self.commits[old_version]

    def state(self) -> dict[str, int]:
        """State for a later scheduler, as plain JSON."""
        return {"step": self.version, "merged": self.merged}

    def drop_stale(self) -> list[Rejection]:
        """Drop deltas that exceed the staleness limit."""
        workers = sorted(self._unaged)
        self._unaged.clear()
        rejections: list[Rejection] = []
        for worker in workers:
            staleness = self._staleness(self.arrived[worker])
            if staleness > self._max_staleness:
                self.discard(worker)
                reason = f"{staleness} deltas were merged since its weights, more than {self._max_staleness}"
                rejections.append(Rejection(worker, reason))
        return rejections

    def reduce(self, current_round: AsyncRound, oldest_version: int | None, is_last: bool) -> Reduce:
        """Start a reduction of all waiting deltas, in the order of worker numbers.

        Args:
            current_round: round that they will belong to.
            oldest_version: oldest version that a worker still trains from; None: no worker trains.
            is_last: whether the run ends with these deltas if all are accepted, even if its last round lacks some.

        """
        self.reducing = dict(sorted(self.arrived.items()))
        self.arrived = {}
        self._unaged.clear()
        deltas = [arrival.delta for arrival in self.reducing.values()]
        round_deltas = min(self._size, len(current_round.accepted) + len(deltas)) if is_last else self._size
        unit = self._size if self._sync.weighting == "uniform" else self._target
        norms = tuple(self._norms)
        return Reduce(
            self.version,
            tuple(delta.source for delta in deltas),
            tuple(weight(self._sync, delta) for delta in deltas),
            tuple(delta.round for delta in deltas),
            self.version if oldest_version is None else oldest_version,
            RoundProgress(
                current_round.number, round_deltas, unit, len(current_round.accepted), current_round.weight, norms
            ),
        )

    def is_awaited(self, verdict: Verdict) -> bool:
        """Whether a verdict belongs to the reduction in progress."""
        return bool(self.reducing) and verdict.round == self.version

    def take_verdict(self, verdict: Verdict) -> list[tuple[Contribution, ReceivedDelta, int]]:
        """Advance the version; return the accepted deltas with their staleness."""
        batch = self.reducing
        self.reducing = {}
        accepted: list[tuple[Contribution, ReceivedDelta, int]] = []
        for contribution in verdict.accepted:
            arrival = batch[contribution.worker]
            accepted.append((with_samples(contribution, arrival.delta), arrival, self._staleness(arrival)))
        self.samples -= sum(arrival.delta.samples for arrival in batch.values())
        self.version = WeightsVersion(self.version + 1)
        self.merged += len(accepted)
        self._norms.extend(contribution.norm for contribution in verdict.accepted)
        if accepted:
            self._rejected_in_a_row = 0
        else:
            self._rejected_in_a_row += sum(rejection.blamed for rejection in verdict.rejected)
        return accepted

    def _staleness(self, arrival: ReceivedDelta) -> int:
        """Number of deltas merged since the weights that a delta was trained from."""
        return self.merged - arrival.local_round.merged
