"""Responses that are trained on: with advantages, and with log-probabilities of the policies that they are held to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from hypha_ray.rl.engines.native import Responses


@dataclass(frozen=True, slots=True)
class Rollout:
    """Responses to a batch of prompts, those to one prompt as neighbours; each tensor is [responses, tokens]."""

    responses: Responses
    advantages: torch.Tensor
    mask: torch.Tensor
    """Mask of the tokens that are trained on."""
    old: torch.Tensor
    """Log-probabilities that ratios are taken to."""
    reference: torch.Tensor | None
    """Log-probabilities of the reference; None without one."""
    correction: torch.Tensor | None
    """Weight of each token for the difference between engine and trainer; None: 1."""

    def __len__(self) -> int:
        return len(self.mask)

    def parts(self, count: int, group: int) -> Iterator[Rollout]:
        """Cut into that many parts along the groups, or into fewer if there are fewer groups."""
        size = -(-(len(self) // group) // count) * group
        for start in range(0, len(self), size):
            yield self.rows(slice(start, start + size))

    def rows(self, rows: slice | torch.Tensor) -> Rollout:
        """Return some of the responses."""
        cut = {one.name: _rows(getattr(self, one.name), rows) for one in fields(self) if one.name != "responses"}
        responses = {one.name: _rows(getattr(self.responses, one.name), rows) for one in fields(self.responses)}
        return Rollout(Responses(**responses), **cut)


def _rows(tensor: Any, rows: slice | torch.Tensor) -> Any:
    return None if tensor is None else tensor[rows]
