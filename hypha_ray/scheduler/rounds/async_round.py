"""Local rounds of an asynchronous run, the deltas they deliver, and the round made of these."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.rounds.metrics import CommitMetrics, RoundMetrics, train_speeds
from hypha_ray.types import Contribution, Delta, Rejection, Span, Verdict, WeightsVersion


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
