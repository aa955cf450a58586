"""State that a scheduler resumes from, and totals over all attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.scheduler.rounds.metrics import total_tokens
from hypha_ray.types import Delta, Layout


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """State of a run at its last commit; by default, of a new run."""

    attempt: int = 1
    """Number of this scheduler in the run, from 1."""
    next_round: int = 0
    used: Mapping[str, Any] = field(default_factory=lambda: {"epoch": 0, "used": []})
    """Used samples, see `Ledger.restore`."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """`Persist.state` of the last round; empty before the first."""
    inner: frozenset[int] = frozenset()
    """Workers whose inner state was saved."""
    layout: Layout | None = None
    """Layout of the model; None if the snapshot lacks it."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """Recorded evaluations, in the order of their rounds."""
    skipped: tuple[str, ...] = ()
    """Parts of the log that couldn't be used, with reasons."""
    lost_s: float = 0.0
    """Seconds that the earlier attempt has trained after its last commit."""

    since_start_s: float = 0.0
    """Seconds from the run's first start to this attempt's; 0 in a run without a deadline."""

    @property
    def evaluated(self) -> bool:
        """Whether the evaluation that `next_round` would begin with is recorded."""
        last_round = self.next_round - 1
        return any(record["round"] == last_round for record in self.evaluations)


class RunTotals:
    """Samples, tokens and training time of a run, earlier attempts included. Times are monotonic seconds, passed in."""

    def __init__(self, before: Mapping[str, Any]) -> None:
        self._counts: dict[str, Any] = {"samples_total": 0, "tokens_total": 0, **before}
        self._before_s = float(before.get("elapsed_s", 0.0))
        self._began_at: float | None = None

    def begin(self, now: float) -> None:
        """Start the clock, unless it runs."""
        if self._began_at is None:
            self._began_at = now

    def count(self, delta: Delta) -> None:
        """Add the samples and tokens of an accepted delta."""
        self._counts["samples_total"] += delta.samples
        self._counts["tokens_total"] = total_tokens((self._counts["tokens_total"], delta.tokens))

    @property
    def samples(self) -> int:
        """Samples of all accepted deltas."""
        return int(self._counts["samples_total"])

    def elapsed_s(self, now: float) -> float:
        """Time that the run has trained."""
        if self._began_at is None:
            return self._before_s
        return self._before_s + now - self._began_at

    def totals(self, now: float) -> dict[str, Any]:
        """All totals, for records and for a later attempt."""
        return {**self._counts, "elapsed_s": self.elapsed_s(now)}
