"""Weights by which losses of tokens are summed, and the total that the sum is divided by.

Sums and totals add up over micro-batches and workers, so neither changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hypha_ray.config.tables.rl import Aggregation

Weights = tuple[torch.Tensor, int]
"""Weight of each token, [responses, tokens], and the total."""


def by_token(mask: torch.Tensor, longest: int) -> Weights:
    """Let each token count the same: the mean over all tokens (DAPO, arXiv 2503.14476).

    Args:
        mask: 1 for a response's tokens, 0 for padding and for responses that are left out, [responses, tokens].
        longest: largest number of tokens of a response; unused.

    """
    return mask, int(mask.sum())


def by_sequence(mask: torch.Tensor, longest: int) -> Weights:
    """Let each response count the same: the mean of responses' means (GRPO, arXiv 2402.03300); as `by_token`."""
    lengths = mask.sum(1, keepdim=True)
    return mask / lengths.clamp(min=1), int((lengths > 0).sum())


def by_constant(mask: torch.Tensor, longest: int) -> Weights:
    """Divide each response's sum by the largest length (Dr. GRPO, arXiv 2503.20783); arguments as in `by_token`."""
    return mask, longest * int((mask.sum(1) > 0).sum())


AGGREGATIONS: dict[Aggregation, Callable[[torch.Tensor, int], Weights]] = {
    "token": by_token,
    "sequence": by_sequence,
    "constant": by_constant,
}
"""Functions of `rl.aggregation`."""
