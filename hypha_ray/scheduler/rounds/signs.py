"""Signs in the records of a run: evaluations that no longer improve, and rounds with nothing to learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hypha_ray.config.schema import Rounds
from hypha_ray.figures import objective_of
from hypha_ray.texts import counted


class EvaluationPatience:
    """Best evaluation of a run so far, and the rounds since then.

    Args:
        rounds: `patience` and `min_delta` of the job.
        evaluations: records of earlier attempts, in the order of their rounds.

    """

    def __init__(self, rounds: Rounds, evaluations: Iterable[Mapping[str, Any]] = ()) -> None:
        self._limit = rounds.patience
        self._min_delta = rounds.min_delta
        self._best: tuple[int, float] | None = None
        """Round and objective of the best evaluation; None before the first with a finite objective."""
        self._name = "val_loss"
        self._newest = -1
        for record in evaluations:
            self.take(record)

    def take(self, record: Mapping[str, Any]) -> None:
        """Add an evaluation; one whose objective isn't finite is no better than any other."""
        objective = objective_of([record])
        self._newest = record["round"]
        value = record.get(objective.name)
        if value is None:
            return
        self._name = objective.name
        if self._best is None or self._is_better(value, self._best[1], upward=objective.best is max):
            self._best = self._newest, value

    def _is_better(self, value: float, best: float, upward: bool) -> bool:
        gain = value - best if upward else best - value
        return gain > 0 and gain >= self._min_delta

    @property
    def exhausted(self) -> str | None:
        """Reason to end the run, in words; None as long as it is to go on. Rounds are counted from one in it."""
        best_round, best = self._best or (-1, None)
        rounds = self._newest - best_round
        if self._limit is None or rounds < self._limit:
            return None
        if best is None:
            return f"no finite {self._name} in {counted(rounds, 'round')}"
        more_rounds = counted(rounds, "more round")
        return f"no better {self._name} than {best:.4g} after round {best_round + 1}, in {more_rounds}"


MOST_TRUNCATED = 0.5
"""Share of responses that may be cut off before it is told."""
LEAST_ENTROPY = 0.01
"""Entropy of a token, in nats, below which a policy gives nearly the same responses to a prompt."""


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
