"""Responses to a piece of a batch, and the names of those that give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from hypha_ray.rl.dataflow.requests import Reply
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.types import Sums


class Rollout(NamedTuple):
    """Responses to a piece, with their rewards."""

    sample: Sample
    """Responses, their log-probabilities and rewards."""
    sums: Sums
    """Figures of them."""
    facts: Mapping[str, Any]
    """Single values."""
    problems: tuple[str, ...]
    """Lines for the user."""
    seconds: float
    """Time of responding and rewarding."""

    def reply(self, kept: Reply) -> Reply:
        """Return the reply by which a worker keeps the samples, with the figures of their making."""
        return replace(kept, sums=self.sums, facts=self.facts, problems=self.problems, seconds=self.seconds)


def rollout_by(role: Any, prompts: Sample, arguments: Mapping[str, Any]) -> Rollout:
    """Respond to prompts by a role that responds and rewards."""
    began = perf_counter()
    outcome = role.generate(prompts, arguments)
    seconds = perf_counter() - began
    return Rollout(outcome.sample, outcome.sums, outcome.facts, outcome.problems, seconds)


def generator_name(number: int) -> str:
    """Return the name of a generator in the namespace of its run."""
    return f"generator-{number}"
