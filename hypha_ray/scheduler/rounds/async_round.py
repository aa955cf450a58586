"""The books of an asynchronous run: what each worker is at, what came, and a round that is made of what came."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.rounds.round import Round, train_speeds
from hypha_ray.types import Contribution, Delta, Rejection, Span, Verdict


@dataclass(frozen=True, slots=True)
class LocalRound:
    """Work of a worker from receiving weights until it hands its delta over.

    Times in seconds, monotonic.
    """

    step: int
    """Number of the run's step that made the weights."""
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
        """Local rounds by worker, in the order of their steps: a round begins from the newest weights."""
        self.reported = 0
        """Samples that are reported of them."""

    @property
    def oldest_step(self) -> int | None:
        """Oldest step that a worker still trains from; None: no worker trains."""
        return next((one.step for one in self.rounds.values()), None)

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
class AsyncRound(Round):
    """A round without a barrier: it ends with so many accepted deltas, of any workers.

    Of what a round has beside that, `worked_s` and `waited_s` are sums over the turns that began in it.
    """

    size: int = 1
    accepted: list[tuple[Contribution, ReceivedDelta, int]] = field(default_factory=list)
    """Accepted deltas in order, with their staleness."""
    rejected: list[Rejection] = field(default_factory=list)
    fleet: int = 0
    """Workers that are at work when it ends."""
    ended_at: float = 0.0
    bytes_up: int = 0
    weight: int = 0
    """Sum of the accepted deltas' weights."""
    accepted_samples: int = 0
    merges: int = 0

    @property
    def whole(self) -> bool:
        """Whether there are deltas enough."""
        return len(self.accepted) >= self.size

    @property
    def samples(self) -> int:
        """Samples behind the deltas that are accepted."""
        return self.accepted_samples

    def accept(self, contribution: Contribution, arrival: ReceivedDelta, staleness: int, weight: int) -> None:
        """Take a delta in, which has a weight in the mean."""
        self.accepted.append((contribution, arrival, staleness))
        self.accepted_samples += arrival.delta.samples
        self.weight += weight

    def began(self, worker: int, waited_s: float | None, worked_s: float, sent_bytes: int) -> None:
        """Note that a worker has weights to begin with, for which it has waited since its last delta, if it had one."""
        self.bytes_down += sent_bytes
        self.worked_s[worker] = self.worked_s.get(worker, 0.0) + worked_s
        if waited_s is not None:
            self.waited_s[worker] = self.waited_s.get(worker, 0.0) + waited_s
            self.merges += 1

    def end(self, update_norm: float, fleet: int, now: float) -> Verdict:
        """The round is over; returns what became of all of its deltas."""
        self.closed, self.fleet, self.ended_at = True, fleet, now
        accepted = tuple(one for one, _, _ in self.accepted)
        self.verdict = Verdict(self.number, accepted, tuple(self.rejected), update_norm)
        return self.verdict

    @property
    def spans(self) -> tuple[tuple[int, tuple[Span, ...]], ...]:
        """Spans that each worker's deltas were trained on."""
        found: dict[int, tuple[Span, ...]] = {}
        for one, arrival, _ in self.accepted:
            found[one.worker] = found.get(one.worker, ()) + arrival.delta.spans
        return tuple(sorted(found.items()))

    def record(self, rounds: int, elapsed_s: float, epoch: int) -> dict[str, Any]:
        """The metrics of the round, one of so many, and the run's totals with it; see docs/telemetry.md."""
        assert self.verdict is not None
        deltas = [arrival.delta for _, arrival, _ in self.accepted]
        staleness = [stale for _, _, stale in self.accepted]
        batches: Counter[int] = Counter()
        for delta in deltas:
            batches[delta.source.worker] += delta.batches
        time_s = self.ended_at - self.started_at
        return {
            **self._figures(deltas, self.verdict, time_s, rounds, elapsed_s),
            "finish_s": time_s,
            "predicted_s": None,
            "plan_error": None,
            **train_speeds(deltas),
            "workers": self.fleet,
            "batches": dict(sorted(batches.items())),
            "bytes_up": self.bytes_up,
            "sync_s": sum(self.waited_s.values()) / max(1, self.merges),
            "rejected": len(self.rejected),
            "arrivals": len(deltas),
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "epoch": epoch,
        }
