"""Responses that are trained on, with what is known of each of their tokens; tensors are [responses, tokens]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from hypha_ray.rl.engines.native import Responses


@dataclass(frozen=True, slots=True)
class Rows:
    """Responses to a batch of prompts, those to one prompt as neighbours."""

    responses: Responses
    mask: torch.Tensor
    """Mask of the tokens that are trained on."""

    def __len__(self) -> int:
        return len(self.mask)

    def parts(self, count: int, group: int) -> Iterator[Self]:
        """Cut into that many parts along the groups, or into fewer if there are fewer groups."""
        size = -(-(len(self) // group) // count) * group
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

    def rows(self, rows: slice | torch.Tensor) -> Self:
        """Return some of the responses."""
        cut = {one.name: _rows(getattr(self, one.name), rows) for one in fields(self) if one.name != "responses"}
        responses = {one.name: _rows(getattr(self.responses, one.name), rows) for one in fields(self.responses)}
        return type(self)(Responses(**responses), **cut)


@dataclass(frozen=True, slots=True)
class Rollout(Rows):
    """Responses that a policy is trained on."""

    advantages: torch.Tensor
    """Advantage of each token, or of each response as [responses, 1]."""
    old: torch.Tensor | None
    """Log-probabilities that ratios are taken to; None: those that the policy has as it is trained."""
    reference: torch.Tensor | None
    """Log-probabilities of the reference; None without one."""


@dataclass(frozen=True, slots=True)
class Valued(Rows):
    """Responses that a critic is trained on."""

    old: torch.Tensor
    """Values that advantages were computed with."""
    returns: torch.Tensor
    """Values to learn."""


def _rows(tensor: Any, rows: slice | torch.Tensor) -> Any:
    return None if tensor is None else tensor[rows]
