"""Records of a few responses, as rollouts.jsonl has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypha_ray.rl.scoring import Scored

_LONGEST = 4000
"""Number of characters that a text is cut to."""


def rollout_records(ids: Sequence[str], scored: Scored, count: int) -> tuple[Mapping[str, Any], ...]:
    """Return records of the first responses of a batch: those to its first prompt, then those to the next one.

    Args:
        ids: epoch, slice and sample of each prompt, with hyphens in between.
        scored: texts of the responses and their rewards.
        count: largest number of records.

    """
    size = scored.total.shape[1]
    return tuple(_record(ids[row // size], scored, *divmod(row, size)) for row in range(len(scored.responses[:count])))


def _record(key: str, scored: Scored, prompt: int, number: int) -> Mapping[str, Any]:
    response = scored.responses[prompt * scored.total.shape[1] + number]
    epoch, index, sample = map(int, key.split("-"))
    return {
        "epoch": epoch,
        "slice": index,
        "sample": sample,
        "prompt": response.prompt[-_LONGEST:],
        "response": response.text[:_LONGEST],
        "tokens": len(response.ids),
        "ended": response.ended,
        "reward": _known(scored.total[prompt, number]),
        "rewards": {name: _known(part[prompt, number]) for name, part in scored.parts.items()},
    }


def _known(reward: float) -> float | None:
    return float(reward) if math.isfinite(reward) else None
