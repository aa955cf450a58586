"""A round with a barrier, from its plans until every worker has merged its result. Times in seconds, monotonic."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hypha_ray.config import Job
from hypha_ray.config.schema import Sync
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.messages import Reduce
from hypha_ray.scheduler.rounds.metrics import CommitMetrics, RoundMetrics, counted, train_speeds, weight
from hypha_ray.types import Delta, Plan, Source, Span, Verdict, WeightsVersion

LOST = "its payload was lost with its node"
"""Reason of a delta's absence from a round without a verdict."""


class RoundQuorum(NamedTuple):
    """Deltas after which a round waits only a while for the others."""

    deltas: int | None = None
    """Number of deltas; None: it waits for all."""
    grace_s: float = 0.0


@dataclass(slots=True)
class BarrierRound:
    """A round that collects deltas."""

    number: int
    started_at: float
    predicted_s: float | None
    """Time that the plans take; None before batch times are known."""
    weights_version: WeightsVersion
    """Version of the weights that workers train from and evaluate."""
    target_samples: int = 0
    """Samples that the round is to have, with those that earlier rounds lacked."""
    eval_shares: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    """Validation samples of each worker, evaluated before it trains."""
    progress: tuple[float, float] | None = None
    """Place in the schedules, as in `Plan`."""
    overlapped: bool = False
    """Whether workers train on before they have its result."""
    replay_plans: dict[int, Plan] = field(default_factory=dict)
    """Plans of lost workers, which their successors carry out exactly, in replay mode."""
    awaiting: set[int] = field(default_factory=set)
    """Workers whose delta is awaited or in."""
    deltas: dict[int, Delta] = field(default_factory=dict)
    delivered_at: dict[int, float] = field(default_factory=dict)
    quorum: RoundQuorum = field(default_factory=RoundQuorum)
    lost_at: list[float] = field(default_factory=list)
    """Times of the losses of workers without a delta."""
    late: list[tuple[float, int]] = field(default_factory=list)
    """Expected time and samples of each delta that the round hasn't waited for, if quorums are chosen by them."""
    closed_at: float = 0.0
    """Time at which the last awaited delta was there, or the grace time was over."""
    figures: RoundMetrics = field(default_factory=RoundMetrics)

    @property
    def evaluating(self) -> bool:
        """Whether the round begins with an evaluation."""
        return bool(self.eval_shares)

    @property
    def samples(self) -> int:
        """Samples behind the deltas that are in."""
        return sum(delta.samples for delta in self.deltas.values())

    @property
    def complete(self) -> bool:
        """Whether all awaited deltas are in, and there is at least one."""
        return 0 < len(self.deltas) == len(self.awaiting)

    @property
    def ready_at(self) -> float:
        """Time of the last delta."""
        return max(self.delivered_at.values())

    def discard_delta(self, source: Source) -> bool:
        """Drop a worker's delta; False if there is none."""
        delta = self.deltas.get(source.worker)
        if delta is None or delta.source != source:
            return False
        del self.deltas[source.worker], self.delivered_at[source.worker]
        return True

    def reduction(self, sync: Sync) -> Reduce:
        """Order to the server: one outer step of the deltas."""
        sources: list[Source] = []
        weights: list[int] = []
        for _, delta in sorted(self.deltas.items()):
            sources.append(delta.source)
            weights.append(weight(sync, delta))
        return Reduce(self.number, tuple(sources), tuple(weights))

    def judged(self, verdict: Verdict) -> Verdict:
        """The verdict with the samples of each delta, which may differ from its weight."""
        accepted = [counted(contribution, self.deltas[contribution.worker]) for contribution in verdict.accepted]
        return replace(verdict, accepted=tuple(accepted))

    def refused(self, verdict: Verdict) -> set[Source]:
        """Workers whose deltas were rejected for their content."""
        refused: set[Source] = set()
        for rejection in verdict.rejected:
            if rejection.blamed and rejection.worker in self.deltas:
                refused.add(self.deltas[rejection.worker].source)
        return refused


@dataclass(slots=True)
class CommittedRound:
    """A committed round, whose result workers merge."""

    round: BarrierRound
    commit: CommitMetrics
    merging: set[int]
    """Workers that have yet to merge the result."""
    last_merged_at: float
    """Time of the verdict, then of the last merge."""

    @property
    def number(self) -> int:
        """Number of the round."""
        return self.round.number

    @property
    def coded_bytes(self) -> int:
        """Bytes of the coded result for a worker with the weights before; 0 if weights are sent uncoded."""
        return self.commit.verdict.coded_bytes

    def merged(self, worker: int, since: float | None, now: float, sent_bytes: int, waited_s: float | None) -> None:
        """Count a worker's merge; it worked since `since`, and waited since its delta or for `waited_s`."""
        if worker not in self.merging:
            return
        self.merging.discard(worker)
        self.last_merged_at = now
        figures = self.round.figures
        delivered_at = self.round.delivered_at
        figures.bytes_down += sent_bytes
        if worker in delivered_at:
            figures.waited_s[worker] = now - delivered_at[worker] if waited_s is None else waited_s
        began_at = self.round.started_at if since is None else since
        figures.worked_s[worker] = now - began_at

    def record(self, rounds: int, elapsed_s: float, epoch: int) -> dict[str, Any]:
        """Record of the round in a run of so many `rounds`; see docs/telemetry.md."""
        done = self.round
        verdict = self.commit.verdict
        accepted = {contribution.worker for contribution in verdict.accepted}
        deltas = {worker: delta for worker, delta in sorted(done.deltas.items()) if worker in accepted}
        actual_s = done.ready_at - done.started_at
        time_s = actual_s if done.overlapped else self.last_merged_at - done.started_at
        plan_error = None
        if done.predicted_s is not None:
            plan_error = abs(done.predicted_s - actual_s) / actual_s
        return {
            **done.figures.record(self.commit, deltas.values(), time_s, rounds, elapsed_s),
            "finish_s": actual_s,
            "predicted_s": done.predicted_s,
            "plan_error": plan_error,
            **train_speeds(deltas.values()),
            "workers": len(done.figures.worked_s),
            "batches": {worker: delta.batches for worker, delta in deltas.items()},
            "bytes_up": sum(delta.payload_bytes for delta in done.deltas.values()),
            "sync_s": self.last_merged_at - done.ready_at,
            "rejected": len(verdict.rejected),
            "epoch": epoch,
        }


def received_bytes(
    job: Job,
    weight_bytes: tuple[int, tuple[int, ...]],
    done: CommittedRound,
    member: WorkerState,
    version: WeightsVersion,
) -> int:
    """Bytes received for a round's result that a worker has merged.

    Args:
        job: the job file.
        weight_bytes: bytes of all weights, and of each fragment.
        done: the round.
        member: the worker.
        version: version of the weights that the worker has merged now.

    """
    all_bytes, fragment_bytes = weight_bytes
    if member.full_version == version:
        return all_bytes if done.number == version - 1 else 0
    if done.coded_bytes:
        return done.coded_bytes
    return sum(fragment_bytes[fragment] for fragment in fragments_of_round(job, done.number))
