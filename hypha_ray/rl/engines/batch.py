"""Batch of prompts that a server responds to: what of it is there, and what of an answer can't be a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hypha_ray.rl.engines.completions import Completion, unfit
from hypha_ray.rl.engines.sampling import Sampling
from hypha_ray.rl.http import MOST_BYTES, Refused

_TOKEN_BYTES = 1024
"""Most bytes of an answer for each token: a server's words for it and its log-probability take about 150."""


@dataclass(slots=True)
class Batch:
    """Prompts, and the responses that have come."""

    prompts: Sequence[list[int]]
    """Token ids of each prompt."""
    seeds: Sequence[int]
    """Seed of each prompt."""
    sampling: Sampling
    """Settings."""
    ends: Sequence[int]
    """Ids of tokens that end a response."""
    known: frozenset[int]
    """Ids that a response may have."""
    groups: dict[int, list[Completion]] = field(default_factory=dict)
    """Responses by the place of their prompt."""

    def lacking(self) -> list[int]:
        """Return the places of prompts without responses."""
        return [place for place in range(len(self.prompts)) if place not in self.groups]

    def responses(self) -> list[Completion]:
        """Return all responses, those to one prompt as neighbours."""
        return [response for _, group in sorted(self.groups.items()) for response in group]

    def keep(self, groups: Mapping[int, list[Completion]], version: str, told: str | None) -> set[str]:
        """Keep the responses that were made with some weights.

        Args:
            groups: responses by the place of their prompt.
            version: version of the weights.
            told: version that the server has told for all of them; None: each response has its own.

        Returns:
            Versions of the responses that aren't kept.

        """
        others: set[str] = set()
        for place, group in groups.items():
            versions = {str(one.version) for one in group} if told is None else {told}
            if versions == {version}:
                self.groups[place] = group
            others |= versions - {version}
        if told is not None:  # It has told so even if each answer was lost.
            others |= {told} - {version}
        return others

    def most_bytes(self, place: int) -> int:
        """Return the most bytes of an answer to a prompt."""
        tokens = len(self.prompts[place]) + self.sampling.max_tokens
        return MOST_BYTES + _TOKEN_BYTES * tokens * self.sampling.samples

    def check(self, group: Sequence[Completion]) -> None:
        """Refuse responses to a prompt that are too few, too long, not over, or of numbers that can't be.

        Raises:
            Refused: with the number.

        """
        most = self.sampling.max_tokens
        if len(group) != self.sampling.samples:
            raise Refused(f"{len(group)} responses to a prompt instead of {self.sampling.samples}")
        for one in group:
            if reason := unfit(one, self.known):
                raise Refused(reason)
            if len(one.ids) > most or (len(one.ids) < most and one.ids[-1] not in self.ends):
                raise Refused(f"a response of {len(one.ids)} of {most} tokens, the last of them {one.ids[-1]}")
