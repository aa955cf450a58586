"""What a scheduler goes on from: the log of an earlier one, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.types import Layout


@dataclass(frozen=True, slots=True)
class Past:
    """Where a run stands; the defaults are those of a run that begins."""

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
    """Of the model, if the snapshot has it."""
    skipped: tuple[str, ...] = ()
    """What of the log couldn't be used, and why."""
