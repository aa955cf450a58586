"""The books of an asynchronous run: what each worker is at, what came, and a round that is made of what came."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.rounds.metrics import CommitMetrics, RoundMetrics, train_speeds
from hypha_ray.types import Contribution, Delta, Rejection, Span, Verdict, WeightsVersion


@dataclass(frozen=True, slots=True)
class LocalRound:
    """Work of a worker from receiving weights until it hands its delta over.

    Times in seconds, monotonic.
    """

    version: WeightsVersion
    """Version of the weights."""
    merged: int
    """Deltas of the run that were in these weights."""
    began_at: float
    handed_over_at: float | None
    """Time of the worker's delta before this turn; None: it had none."""
    evaluating: bool


class LocalRounds:
    """Local rounds that go on, and sums over them."""

    def __init__(self) -> None:
        self.rounds: dict[int, LocalRound] = {}
        """Local rounds by worker, in the order of their versions: a round begins from the newest weights."""
        self.reported = 0
        """Samples that are reported of them."""

    @property
    def oldest_version(self) -> WeightsVersion | None:
        """Oldest version that a worker still trains from; None: no worker trains."""
        return next((one.version for one in self.rounds.values()), None)

    def report(self, member: WorkerState, samples: int) -> None:
        """Count samples that a worker has reported, if it trains."""
        if member.source.worker in self.rounds:
            self.reported += samples

    def pop(self, member: WorkerState) -> LocalRound | None:
        """End a worker's local round; None: it has none."""
        ended = self.rounds.pop(member.source.worker, None)
        self.reported -= 0 if ended is None else member.progress.samples
        return ended


@dataclass(frozen=True, slots=True)
class ReceivedDelta:
    """A delta that came, and the turn that it ends."""

    delta: Delta
    turn: LocalRound


@dataclass(slots=True)
class AsyncRound:
    """A round without a barrier: it ends with so many accepted deltas, of any workers.

    Its figures are sums over the turns that began in it.
    """

    number: int
    started_at: float
    size: int
    """Accepted deltas with which it ends."""
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
    """Turns that began after a delta of the same worker."""

    @property
    def whole(self) -> bool:
        """Whether there are deltas enough."""
        return len(self.accepted) >= self.size

    def accept(self, contribution: Contribution, arrival: ReceivedDelta, staleness: int, weight: int) -> None:
        """Take a delta in, which has a weight in the mean."""
        self.accepted.append((contribution, arrival, staleness))
        self.samples += arrival.delta.samples
        self.weight += weight

    def began(self, worker: int, waited_s: float | None, worked_s: float, sent_bytes: int) -> None:
        """Count weights that a worker has merged; it has waited for them since its last delta, if it had one."""
        figures = self.figures
        figures.bytes_down += sent_bytes
        figures.worked_s[worker] = figures.worked_s.get(worker, 0.0) + worked_s
        if waited_s is not None:
            figures.waited_s[worker] = figures.waited_s.get(worker, 0.0) + waited_s
            self.merges += 1

    def verdict(self, update_norm: float) -> Verdict:
        """Verdict on all of the round's deltas."""
        return Verdict(self.number, tuple(one for one, _, _ in self.accepted), tuple(self.rejected), update_norm)

    @property
    def spans(self) -> tuple[tuple[int, tuple[Span, ...]], ...]:
        """Spans that each worker's deltas were trained on."""
        found: dict[int, tuple[Span, ...]] = {}
        for one, arrival, _ in self.accepted:
            found[one.worker] = found.get(one.worker, ()) + arrival.delta.spans
        return tuple(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class CommittedAsyncRound:
    """A round whose record waits for the evaluation of the weights before it."""

    round: AsyncRound
    commit: CommitMetrics
    workers: int
    """Workers that were at work when it ended."""
    ended_at: float

    @property
    def number(self) -> int:
        """Number of the round."""
        return self.round.number

    @property
    def merging(self) -> set[int]:
        """Workers whose merge is waited for: none, because each begins its turn with the newest weights."""
        return set()

    def record(self, rounds: int, elapsed_s: float, epoch: int) -> dict[str, Any]:
        """Metrics of the round, one of so many, and the run's totals with it; see docs/telemetry.md."""
        done = self.round
        deltas = [arrival.delta for _, arrival, _ in done.accepted]
        staleness = [stale for _, _, stale in done.accepted]
        batches: Counter[int] = Counter()
        for delta in deltas:
            batches[delta.source.worker] += delta.batches
        time_s = self.ended_at - done.started_at
        return {
            **done.figures.record(self.commit, deltas, time_s, rounds, elapsed_s),
            "finish_s": time_s,
            "predicted_s": None,
            "plan_error": None,
            **train_speeds(deltas),
            "workers": self.workers,
            "batches": dict(sorted(batches.items())),
            "bytes_up": done.bytes_up,
            "sync_s": sum(done.figures.waited_s.values()) / max(1, done.merges),
            "rejected": len(done.rejected),
            "arrivals": len(deltas),
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "epoch": epoch,
        }
