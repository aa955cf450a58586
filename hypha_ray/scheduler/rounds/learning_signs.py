"""Signs in the records of rounds that reinforcement learning has nothing to learn from, each told once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST_TRUNCATED = 0.5
"""Share of responses that may be cut off before it is told."""
LEAST_ENTROPY = 0.01
"""Entropy of a token, in nats, below which a policy gives nearly the same responses to a prompt."""


class LearningReports:
    """Remembers which signs have been told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def fresh(self, record: Mapping[str, Any]) -> list[str]:
        """Return texts for the user, of signs in the record of a round that no earlier one had."""
        signs = {name: text for name, text in _signs(record) if name not in self._told}
        self._told.update(signs)
        return list(signs.values())


def _signs(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    equal, truncated, entropy = (record.get(name) for name in ("equal_groups", "truncated", "entropy"))
    if equal is not None and equal >= 1:
        mean = record.get("reward")
        level = "" if mean is None else f", {mean:.3g} in the mean"
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
