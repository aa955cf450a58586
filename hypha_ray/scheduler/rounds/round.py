"""The books of one round and of one evaluation, and the records that are made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hypha_ray.config.schema import Sync
from hypha_ray.figures import figures_of
from hypha_ray.types import Contribution, Delta, Evaluated, Plan, Report, Source, Span, Verdict, added, means

LOST = "its payload was lost with its node"
"""Reason of a delta's absence from a round without a verdict."""


@dataclass(slots=True)
class Round:
    """One outer round, from its plans to the moment when every worker has its result. Times in seconds, monotonic."""

    number: int
    started_at: float
    predicted_s: float | None
    final: bool = False
    """It only evaluates."""
    eval_shares: dict[int, tuple[Span, ...]] = field(default_factory=dict)
    """Validation samples of each worker, evaluated before it trains."""
    weights_version: int = 0
    """Number of the weights that are due in it, and evaluated."""
    overlapped: bool = False
    """Workers train on while its result is on its way."""
    closed: bool = False
    """No more deltas are taken."""
    replay_plans: dict[int, Plan] = field(default_factory=dict)
    """Plans of lost workers that their successors carry out to the letter, in replay mode."""
    awaiting: set[int] = field(default_factory=set)
    """Workers whose delta is awaited."""
    deltas: dict[int, Delta] = field(default_factory=dict)
    delivered_at: dict[int, float] = field(default_factory=dict)
    batch_s: dict[int, float] = field(default_factory=dict)
    learning_rate: float | None = None
    verdict: Verdict | None = None
    merging: set[int] = field(default_factory=set)
    """Workers that still have to merge the round's result."""
    bytes_down: int = 0
    """Bytes of the result, over all workers that have merged it."""
    waited_s: dict[int, float] = field(default_factory=dict)
    worked_s: dict[int, float] = field(default_factory=dict)
    last_merged_at: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)
    """Totals of the run, with this round."""

    @property
    def evaluating(self) -> bool:
        """Does the round begin with an evaluation?"""
        return bool(self.eval_shares)

    @property
    def samples(self) -> int:
        """Samples behind the deltas that are in."""
        return sum(delta.samples for delta in self.deltas.values())

    @property
    def complete(self) -> bool:
        """Whether every delta that is awaited is in, and there is one; only awaited ones are taken."""
        return 0 < len(self.deltas) == len(self.awaiting)

    @property
    def coded_bytes(self) -> int:
        """Bytes sent to a worker that has the weights of the round before; 0: the new weights themselves."""
        return 0 if self.verdict is None else self.verdict.coded_bytes

    @property
    def ready_at(self) -> float:
        """Time of the last delta."""
        return max(self.delivered_at.values())

    @property
    def refused(self) -> set[Source]:
        """Workers whose deltas were rejected for what is in them."""
        numbers = set() if self.verdict is None else {one.worker for one in self.verdict.rejected if one.blamed}
        return {delta.source for worker, delta in self.deltas.items() if worker in numbers}

    def discard_delta(self, source: Source) -> bool:
        """Leave out what a worker has handed over; False if that is nothing."""
        delta = self.deltas.get(source.worker)
        if delta is None or delta.source != source:
            return False
        del self.deltas[source.worker], self.delivered_at[source.worker]
        return True

    def judged(self, verdict: Verdict, now: float) -> Verdict:
        """Take the server's verdict; returned with the samples behind each delta, which aren't always its weight."""
        accepted = tuple(counted(one, self.deltas[one.worker]) for one in verdict.accepted)
        self.verdict, self.last_merged_at = replace(verdict, accepted=accepted), now
        return self.verdict

    def merged(self, worker: int, since: float | None, now: float, sent_bytes: int, waited_s: float | None) -> None:
        """Note that a worker has the result: it worked from `since` on, and waited since its delta, or as it says."""
        if worker not in self.merging:
            return
        self.merging.discard(worker)
        self.last_merged_at = now
        self.bytes_down += sent_bytes
        if worker in self.delivered_at:
            self.waited_s[worker] = now - self.delivered_at[worker] if waited_s is None else waited_s
        self.worked_s[worker] = now - (self.started_at if since is None else since)

    def record(self, rounds: int, elapsed_s: float, epoch: int) -> dict[str, Any]:
        """The metrics of the round, one of so many, and the run's totals with it; see docs/telemetry.md."""
        assert self.verdict is not None
        accepted = {contribution.worker for contribution in self.verdict.accepted}
        deltas = {worker: delta for worker, delta in sorted(self.deltas.items()) if worker in accepted}
        actual_s = self.ready_at - self.started_at
        time_s = actual_s if self.overlapped else self.last_merged_at - self.started_at
        return {
            **self._figures(deltas.values(), self.verdict, time_s, rounds, elapsed_s),
            "finish_s": actual_s,
            "predicted_s": self.predicted_s,
            "plan_error": None if self.predicted_s is None else abs(self.predicted_s - actual_s) / actual_s,
            **train_speeds(deltas.values()),
            "workers": len(self.worked_s),
            "batches": {worker: delta.batches for worker, delta in deltas.items()},
            "bytes_up": sum(delta.payload_bytes for delta in self.deltas.values()),
            "sync_s": self.last_merged_at - self.ready_at,
            "rejected": len(self.verdict.rejected),
            "epoch": epoch,
        }

    def _figures(
        self, deltas: Collection[Delta], verdict: Verdict, time_s: float, rounds: int, elapsed_s: float
    ) -> dict[str, Any]:
        """Fields that the records of all kinds of rounds have, of accepted deltas."""
        train_s = sum(delta.train_s for delta in deltas)
        return {
            "kind": "round",
            "round": self.number,
            "rounds": rounds,
            "time_s": time_s,
            "loss": _mean_loss(deltas),
            **means(added(delta.sums for delta in deltas)),
            **_throughput(deltas, time_s),
            "batch_s": dict(sorted(self.batch_s.items())),
            "codec_error": _mean(deltas, lambda delta: delta.quality[0]),
            "codec_cosine": _mean(deltas, lambda delta: delta.quality[1]),
            "bytes_down": self.bytes_down,
            "idle_fraction": sum(self.waited_s.values()) / max(sum(self.worked_s.values()), 1e-9),
            "data_wait_fraction": sum(delta.data_wait_s for delta in deltas) / train_s if train_s else 0.0,
            "learning_rate": self.learning_rate,
            "update_norm": verdict.update_norm,
            **self.totals,
            "elapsed_s": elapsed_s,
            "eta_s": elapsed_s / (self.number + 1) * (rounds - self.number - 1),
        }


@dataclass(slots=True)
class Evaluation:
    """The validation of the weights after round `number`, shared out to the workers."""

    weights_round: int
    pending: dict[int, tuple[Span, ...]]
    """Shares that are being evaluated, by worker."""
    lost: list[tuple[Span, ...]] = field(default_factory=list)
    """Shares of lost workers, for the next workers that come."""
    parts: dict[tuple[Span, ...], Evaluated] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every share is evaluated."""
        return not self.pending and not self.lost

    def take(self, part: Evaluated) -> None:
        """Add a worker's share; one that is no longer awaited is ignored."""
        share = self.pending.pop(part.source.worker, None)
        if share is not None:
            self.parts[share] = part

    def lose(self, worker: int) -> None:
        """Put a lost worker's share back."""
        share = self.pending.pop(worker, None)
        if share is not None:
            self.lost.append(share)

    def hand_out(self, worker: int) -> tuple[Span, ...]:
        """Give a lost share to a worker that has none; nothing, if none is lost."""
        if not self.lost or worker in self.pending:
            return ()
        self.pending[worker] = self.lost.pop()
        return self.pending[worker]

    def record(self, perplexity: bool) -> dict[str, Any] | None:
        """Figures that all parts have, and the perplexity if wanted; None as long as a part is missing."""
        parts = [part for _, part in sorted(self.parts.items()) if any(weight for _, weight in part.sums.values())]
        if not parts or not self.complete:
            return None
        common = set.intersection(*(set(part.sums) for part in parts))
        sums = {name: one for name, one in added(part.sums for part in parts).items() if name in common}
        found, count = figures_of(sums, perplexity), int(max((weight for _, weight in sums.values()), default=0))
        seconds = max(part.seconds for part in parts)
        return {"kind": "eval", "round": self.weights_round, **found, "count": count, "seconds": seconds}


def weight(sync: Sync, delta: Delta) -> int:
    """Weight of a worker's result in the mean: its samples; of a mean gradient the positions that it is a mean over."""
    if sync.weighting == "uniform":
        return 1
    return delta.scored if sync.traits.sends_gradients else delta.samples


def counted(contribution: Contribution, delta: Delta) -> Contribution:
    """The same contribution with the samples behind it, which aren't always its weight."""
    return replace(contribution, samples=delta.samples)


def total_tokens(counts: Iterable[int | None]) -> int | None:
    """Sum of token counts; None if one of them is unknown, as that of data without tokens."""
    known = list(counts)
    found = [count for count in known if count is not None]
    return sum(found) if found and len(found) == len(known) else None


def train_speeds(deltas: Iterable[Delta]) -> dict[str, float]:
    """Samples and, if there are, tokens a second of all workers together while they train.

    A worker with several deltas counts with its mean speed over them.
    """
    by_worker: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_worker.setdefault(delta.source.worker, []).append(delta)
    samples, tokens = 0.0, [0.0]
    for own in by_worker.values():
        if seconds := sum(delta.train_s for delta in own):
            samples += sum(delta.samples for delta in own) / seconds
            count = total_tokens(delta.tokens for delta in own)
            tokens.append(math.nan if count is None else count / seconds)
    speeds = {"train_samples_per_s": samples, "train_tokens_per_s": sum(tokens)}
    return {name: speed for name, speed in speeds.items() if not math.isnan(speed)}


def _throughput(deltas: Collection[Delta], time_s: float) -> dict[str, Any]:
    """Counts of a round, and each a second; rates of tokens only where there are tokens."""
    counts = {
        "samples": sum(delta.samples for delta in deltas),
        "tokens": total_tokens(delta.tokens for delta in deltas),
        "scored": sum(delta.scored for delta in deltas),
    }
    seconds = max(time_s, 1e-9)
    return counts | {f"{name}_per_s": count / seconds for name, count in counts.items() if count is not None}


def _mean_loss(deltas: Collection[Delta]) -> float | None:
    """Mean loss over all scored positions; None if there are none."""
    scored = sum(delta.scored for delta in deltas)
    return sum(delta.loss * delta.scored for delta in deltas if delta.loss is not None) / scored if scored else None


def _mean(deltas: Collection[Delta], of: Callable[[Delta], float]) -> float:
    return sum(map(of, deltas)) / max(1, len(deltas))


def step_record(report: Report, round_samples: int, round_target: int) -> dict[str, Any]:
    """Progress of one worker; of the fleet, `round_samples` of the round's `round_target` samples are reported."""
    return {
        "kind": "step",
        "worker": report.source.worker,
        "incarnation": report.source.incarnation,
        "round": report.round,
        "loss": report.loss_sum / report.scored if report.scored else None,
        **means(report.sums),
        "learning_rate": report.learning_rate,
        "gradient_norm": report.gradient_norm,
        "samples": report.samples,
        "tokens": report.tokens,
        "scored": report.scored,
        "batch_s": report.seconds / report.timed_batches if report.timed_batches else None,
        "round_samples": round_samples,
        "round_target": round_target,
    }
