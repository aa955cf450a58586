"""State of a run that a scheduler resumes from, and totals over all attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.scheduler.rounds.metrics import total_tokens
from hypha_ray.types import Delta, Layout


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """State of a run at its last commit; the defaults are those of a new run."""

    attempt: int = 1
    """Number of this scheduler, over the whole run."""
    next_round: int = 0
    used: Mapping[str, Any] = field(default_factory=lambda: {"epoch": 0, "used": []})
    """See `Ledger.restore`."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """`Persist.state` of the last round."""
    inner: frozenset[int] = frozenset()
    """Workers whose inner state was saved with it."""
    evaluated: bool = False
    """Whether there is a record of the evaluation that `next_round` would begin with."""
    layout: Layout | None = None
    """Layout of the model, if the snapshot has it."""
    skipped: tuple[str, ...] = ()
    """Parts of the log that couldn't be used, with reasons."""


class RunTotals:
    """Samples, tokens and time. Times are monotonic seconds, passed in.

    Args:
        before: `totals` of the attempts before; empty in the first.

    """

    def __init__(self, before: Mapping[str, Any]) -> None:
        self._counts: dict[str, Any] = {"samples_total": 0, "tokens_total": 0, **before}
        self._before_s = float(before.get("elapsed_s", 0.0))
        self._began_at: float | None = None

    def begin(self, now: float) -> None:
        """Training begins, or goes on."""
        self._began_at = now if self._began_at is None else self._began_at

    def count(self, delta: Delta) -> None:
        """Add what a delta that was accepted is made of."""
        self._counts["samples_total"] += delta.samples
        self._counts["tokens_total"] = total_tokens((self._counts["tokens_total"], delta.tokens))

    @property
    def samples(self) -> int:
        """Samples behind all deltas that were accepted."""
        return int(self._counts["samples_total"])

    def elapsed_s(self, now: float) -> float:
        """Time that the run has trained."""
        return self._before_s if self._began_at is None else self._before_s + now - self._began_at

    def totals(self, now: float) -> dict[str, Any]:
        """All of it, for a record, and for the attempt that may follow."""
        return {**self._counts, "elapsed_s": self.elapsed_s(now)}
