"""Fields of round and step records, computed from deltas and reports; and signs in records that a user should know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.types import Delta, Report, Verdict, added, means

MOST_TRUNCATED = 0.5
"""Share of responses that may be cut off before it is told."""
LEAST_ENTROPY = 0.01
"""Entropy of a token, in nats, below which a policy gives nearly the same responses to a prompt."""


@dataclass(frozen=True, slots=True)
class CommitMetrics:
    """Figures known at a round's commit."""

    verdict: Verdict
    batch_s: dict[int, float]
    """Seconds per batch, by worker, if known."""
    totals: dict[str, Any]
    """Totals of the run including this round."""


@dataclass(slots=True)
class RoundMetrics:
    """Figures that workers' events add to a round of any strategy. Times in seconds, by worker."""

    learning_rate: float | None = None
    """Learning rate reported last; None before the first report."""
    bytes_down: int = 0
    """Bytes of weights that workers have received."""
    waited_s: dict[int, float] = field(default_factory=dict)
    """Time between a worker's delta and new weights."""
    worked_s: dict[int, float] = field(default_factory=dict)
    """Time between the weights before and new ones."""

    def record(
        self, commit: CommitMetrics, deltas: Collection[Delta], time_s: float, rounds: int, elapsed_s: float
    ) -> dict[str, Any]:
        """Fields common to all strategies, from accepted deltas, in a run of so many `rounds`."""
        train_s = sum(delta.train_s for delta in deltas)
        data_wait_s = sum(delta.data_wait_s for delta in deltas)
        worked_s = max(sum(self.worked_s.values()), 1e-9)
        round_number = commit.verdict.round
        round_s = elapsed_s / (round_number + 1)
        return {
            "kind": "round",
            "round": round_number,
            "rounds": rounds,
            "time_s": time_s,
            "loss": _mean_loss(deltas),
            **means(added(delta.sums for delta in deltas)),
            **_throughput(deltas, time_s),
            **utilisation(deltas, time_s),
            "batch_s": dict(sorted(commit.batch_s.items())),
            **peak_memory(deltas),
            "codec_error": _mean(deltas, lambda delta: delta.quality[0]),
            "codec_cosine": _mean(deltas, lambda delta: delta.quality[1]),
            "bytes_down": self.bytes_down,
            "idle_fraction": sum(self.waited_s.values()) / worked_s,
            "data_wait_fraction": data_wait_s / train_s if train_s else 0.0,
            "learning_rate": self.learning_rate,
            "update_norm": commit.verdict.update_norm,
            **commit.totals,
            "elapsed_s": elapsed_s,
            "eta_s": round_s * (rounds - round_number - 1),
        }


def total_tokens(counts: Iterable[int | None]) -> int | None:
    """Sum of token counts; None if one is unknown, as for data without tokens."""
    total: int | None = None
    for count in counts:
        if count is None:
            return None
        total = count if total is None else total + count
    return total


def train_speeds(deltas: Iterable[Delta]) -> dict[str, float]:
    """Samples, and tokens if there are any, per second of training of all workers together.

    A worker with several deltas counts with its mean speed.
    """
    samples_per_s = 0.0
    tokens_per_s = 0.0
    has_tokens = True
    for worker_deltas in _group_by_worker(deltas).values():
        train_s = sum(delta.train_s for delta in worker_deltas)
        if not train_s:
            continue
        samples_per_s += sum(delta.samples for delta in worker_deltas) / train_s
        tokens = total_tokens(delta.tokens for delta in worker_deltas)
        if tokens is None:
            has_tokens = False
        else:
            tokens_per_s += tokens / train_s
    speeds = {"train_samples_per_s": samples_per_s}
    if has_tokens:
        speeds["train_tokens_per_s"] = tokens_per_s
    return speeds


def _group_by_worker(deltas: Iterable[Delta]) -> dict[int, list[Delta]]:
    """Deltas of each worker."""
    by_worker: dict[int, list[Delta]] = {}
    for delta in deltas:
        worker_deltas = by_worker.setdefault(delta.source.worker, [])
        worker_deltas.append(delta)
    return by_worker


def utilisation(deltas: Iterable[Delta], time_s: float) -> dict[str, Any]:
    """Operations of training ÷ those that GPUs are made for: of the fleet in `time_s`, of each worker while it trains.

    A worker whose model or GPU has no known figure is left out, and the fleet has none then.
    """
    by_worker = _group_by_worker(deltas)
    mfu_by_worker = dict[int, float]()
    fleet_operations = 0.0
    fleet_peak = 0.0
    for worker, worker_deltas in sorted(by_worker.items()):
        operations = _operations(worker_deltas)
        peak = worker_deltas[-1].peak_operations
        train_s = sum(delta.train_s for delta in worker_deltas)
        if operations is not None and peak is not None and train_s:
            mfu_by_worker[worker] = operations / (train_s * peak)
            fleet_operations += operations
            fleet_peak += peak
    if not mfu_by_worker:
        return {}
    if len(mfu_by_worker) < len(by_worker):
        return {"mfu_by_worker": mfu_by_worker}
    possible = max(time_s, 1e-9) * fleet_peak
    return {"mfu": fleet_operations / possible, "mfu_by_worker": mfu_by_worker}


def _operations(deltas: Iterable[Delta]) -> float | None:
    """Return the operations behind a worker's deltas; None if those of one aren't known."""
    operations = 0.0
    for delta in deltas:
        if delta.tokens is None or delta.token_operations is None:
            return None
        operations += delta.tokens * delta.token_operations
    return operations


def peak_memory(deltas: Iterable[Delta]) -> dict[str, dict[int, int]]:
    """Most memory that each worker with a GPU took, by its deltas; nothing if none has one."""
    peaks: dict[int, int] = {}
    for delta in deltas:
        if delta.peak_memory_bytes is not None:
            worker = delta.source.worker
            peaks[worker] = max(peaks.get(worker, 0), delta.peak_memory_bytes)
    if not peaks:
        return {}
    return {"peak_memory_bytes": dict(sorted(peaks.items()))}


def _throughput(deltas: Collection[Delta], time_s: float) -> dict[str, Any]:
    """Counts of a round, and their rates per second; no rate of tokens without tokens."""
    counts = {
        "samples": sum(delta.samples for delta in deltas),
        "tokens": total_tokens(delta.tokens for delta in deltas),
        "scored": sum(delta.scored for delta in deltas),
    }
    seconds = max(time_s, 1e-9)
    figures: dict[str, Any] = dict(counts)
    for name, count in counts.items():
        if count is not None:
            figures[f"{name}_per_s"] = count / seconds
    return figures


def _mean_loss(deltas: Collection[Delta]) -> float | None:
    """Mean loss over all scored positions; None if there are none."""
    scored = sum(delta.scored for delta in deltas)
    if not scored:
        return None
    loss_sum = 0.0
    for delta in deltas:
        if delta.loss is not None:
            loss_sum += delta.loss * delta.scored
    return loss_sum / scored


def _mean(deltas: Collection[Delta], figure: Callable[[Delta], float]) -> float:
    return sum(map(figure, deltas)) / max(1, len(deltas))


def step_record(report: Report, round_samples: int, round_target: int) -> dict[str, Any]:
    """Record of a worker's report; the fleet has reported `round_samples` of `round_target` samples."""
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


class LearningReports:
    """Remembers which signs have been reported."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def fresh(self, record: Mapping[str, Any]) -> list[str]:
        """Return texts for the user, of signs in the record of a round that no earlier one had."""
        texts: list[str] = []
        for name, text in _signs(record):
            if name not in self._reported:
                self._reported.add(name)
                texts.append(text)
        return texts


def _signs(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    equal_groups = record.get("equal_groups")
    truncated = record.get("truncated")
    entropy = record.get("entropy")
    if equal_groups is not None and equal_groups >= 1:
        reward = record.get("reward")
        level = "" if reward is None else f", {reward:.3g} in the mean"
        yield (
            "equal_groups",
            f"all responses to a prompt got equal rewards in a whole round{level}: nothing was learned from them; "
            "see rollouts.jsonl",
        )
    if truncated is not None and truncated > MOST_TRUNCATED:
        yield (
            "truncated",
            f"{truncated:.0%} of a round's responses were cut off: rl.generation.max_response_tokens may be too small, "
            "or the policy doesn't end its responses",
        )
    if entropy is not None and entropy < LEAST_ENTROPY:
        yield (
            "entropy",
            f"the policy's entropy is near 0 ({entropy:.2g}): it gives nearly the same response to a prompt each time",
        )
