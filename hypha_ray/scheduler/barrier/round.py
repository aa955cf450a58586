"""A round with a barrier, from its plans until every worker has merged its result; and the choice of its quorum.

Times are monotonic seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

from hypha_ray.config import Job
from hypha_ray.config.schema import Sync
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.scheduler.messages import Reduce
from hypha_ray.scheduler.worker_state import WorkerState, weight, with_samples
from hypha_ray.telemetry.round_records import CommitMetrics, RoundMetrics, train_speeds
from hypha_ray.types import Contribution, Delta, Plan, Source, Span, Verdict, WeightsVersion

LOST = "its payload was lost with its node"
"""Reason of a delta's absence from a round without a verdict."""
KNOWN_ROUNDS = 16
"""Number of last rounds that a quorum is chosen by."""
LEAST_ROUNDS = 3
"""Number of rounds that wait for all deltas before the first choice."""
LARGEST_PART = 0.25
"""Largest part of the deltas without which a round may be closed."""
LEAST_GAIN = 0.01
"""Relative gain in time for a sample from which deltas are dropped."""
ROUNDING = 1e-9
"""Relative difference of times that are taken as equal; of equal quorums the largest is chosen."""
WAITS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Quantiles of the late deltas' delays that are tried as the grace time."""


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
    """Workers whose delta is awaited or has arrived."""
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
        """Samples of the deltas that have arrived."""
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
        accepted_contributions: list[Contribution] = []
        for contribution in verdict.accepted:
            accepted_contributions.append(with_samples(contribution, self.deltas[contribution.worker]))
        return replace(verdict, accepted=tuple(accepted_contributions))

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
        done_round = self.round
        verdict = self.commit.verdict
        accepted_workers = {contribution.worker for contribution in verdict.accepted}
        deltas = {worker: delta for worker, delta in sorted(done_round.deltas.items()) if worker in accepted_workers}
        actual_s = done_round.ready_at - done_round.started_at
        time_s = actual_s if done_round.overlapped else self.last_merged_at - done_round.started_at
        plan_error = None
        if done_round.predicted_s is not None and actual_s > 0:
            plan_error = abs(done_round.predicted_s - actual_s) / actual_s
        return {
            **done_round.figures.record(self.commit, deltas.values(), time_s, rounds, elapsed_s),
            "finish_s": actual_s,
            "predicted_s": done_round.predicted_s,
            "plan_error": plan_error,
            **train_speeds(deltas.values()),
            "workers": len(done_round.figures.worked_s),
            "batches": {worker: delta.batches for worker, delta in deltas.items()},
            "bytes_up": sum(delta.payload_bytes for delta in done_round.deltas.values()),
            "sync_s": self.last_merged_at - done_round.ready_at,
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
    """Bytes received for a round's result by a worker that has merged weights of this version."""
    all_bytes, fragment_bytes = weight_bytes
    if member.full_version == version:
        return all_bytes if done.number == version - 1 else 0
    coded_bytes = done.commit.verdict.coded_bytes
    if coded_bytes:  # The worker had the weights before.
        return coded_bytes
    return sum(fragment_bytes[fragment] for fragment in fragments_of_round(job, done.number))


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """Arrivals of a round's deltas, in order of time."""

    times_s: tuple[float, ...]
    """Seconds from the beginning of the round; those of losses are among them."""
    samples: tuple[int, ...]
    """Samples of all deltas up to each arrival."""
    exchange_s: float
    """Seconds from the round's end to the beginning of the next one."""

    def quorum_at(self, absent_count: int) -> float:
        """Time at which all but so many deltas are there, or the first one."""
        return self.times_s[max(0, len(self.times_s) - 1 - absent_count)]

    def closed(self, absent_count: int, grace_s: float) -> tuple[float, int]:
        """Time at which the round closes without up to so many deltas, and the samples that are there by then."""
        closes_s = min(self.times_s[-1], self.quorum_at(absent_count) + grace_s)
        return closes_s, self.samples[bisect_right(self.times_s, closes_s) - 1]


class QuorumPlanner:
    """Gives each round its quorum, which is the job's, or with ``auto`` chosen by the last rounds.

    Each of them is closed anew by every candidate, from the times at which its deltas came or were expected. The quorum
    with the least time for a committed sample wins:

        Σ (time until the round closes + time from there to the next round)  ÷  Σ samples that have arrived by then

    A late delta's samples are trained again. So a quorum that drops deltas has to be better than the wait for all of
    them by `LEAST_GAIN`. A worker that is lost in a round counts as one that delivers nothing at the time of its loss.
    So the risk of a loss within a round is in these sums as often as it occurred.
    """

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self.adapts = "auto" in (sync.quorum, sync.grace_s) and sync.quorum is not None
        """Whether the quorum, or its wait, is chosen by earlier rounds."""
        self._rounds: deque[_Arrivals] = deque(maxlen=KNOWN_ROUNDS)

    def observe(self, closed: BarrierRound, next_at: float) -> None:
        """Take in the arrivals of a round after which another one begins at `next_at`."""
        if not self.adapts or not closed.deltas or closed.number == 0:  # The first round warms up caches.
            return
        arrivals = [(arrived_at, closed.deltas[worker].samples) for worker, arrived_at in closed.delivered_at.items()]
        arrivals += closed.late
        arrivals += [(arrived_at, 0) for arrived_at in closed.lost_at]
        arrivals.sort()
        times_s = tuple(arrived_at - closed.started_at for arrived_at, _ in arrivals)
        samples = tuple(accumulate(samples for _, samples in arrivals))
        self._rounds.append(_Arrivals(times_s, samples, max(0.0, next_at - closed.closed_at)))

    def choose(self, workers: int) -> RoundQuorum:
        """Quorum of a round of so many workers."""
        quorum = self._sync.quorum
        grace_s = self._sync.grace_s
        if quorum != "auto" and grace_s != "auto":
            return RoundQuorum(quorum, grace_s)
        if quorum is None or len(self._rounds) < LEAST_ROUNDS:
            return RoundQuorum()
        best_s = (1 - LEAST_GAIN) * self._sample_s(0, 0.0)
        best = RoundQuorum()
        for absent_count in self._absences(workers):
            for wait_s in self._waits(absent_count):
                sample_s = self._sample_s(absent_count, wait_s)
                if sample_s < (1 - ROUNDING) * best_s:
                    best_s = sample_s
                    best = RoundQuorum(max(1, workers - absent_count), wait_s)
        return best

    def _absences(self, workers: int) -> Iterator[int]:
        """Numbers of deltas that may be missing: the job's, or 1, 2, 4 … up to a part of the workers."""
        if isinstance(self._sync.quorum, int):
            yield max(0, workers - self._sync.quorum)
            return
        absent_count = 1
        while absent_count <= LARGEST_PART * workers:
            yield absent_count
            absent_count *= 2

    def _waits(self, absent_count: int) -> list[float]:
        """Grace times to be tried: the job's, or none and quantiles of late deltas' times after the quorum."""
        if self._sync.grace_s != "auto":
            return [self._sync.grace_s]
        delays_s = [0.0]
        for arrivals in self._rounds:
            quorum_s = arrivals.quorum_at(absent_count)
            first_late = max(1, len(arrivals.times_s) - absent_count)
            delays_s += [time_s - quorum_s for time_s in arrivals.times_s[first_late:]]
        delays_s.sort()
        last_index = len(delays_s) - 1
        return sorted({delays_s[round(quantile * last_index)] for quantile in WAITS})

    def _sample_s(self, absent_count: int, grace_s: float) -> float:
        """Seconds for each sample that arrives in time, over the known rounds."""
        exchange_s = median(arrivals.exchange_s for arrivals in self._rounds)
        seconds = 0.0
        samples = 0
        for arrivals in self._rounds:
            closes_s, in_time = arrivals.closed(absent_count, grace_s)
            seconds += closes_s + exchange_s
            samples += in_time
        return seconds / max(1, samples)
