"""Advantages of single tokens from the values of a critic."""

from __future__ import annotations

import torch

_LEAST_VARIANCE = 1e-8


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, discount: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantages (arXiv 1506.02438), and returns for the critic to learn.

    A response that was cut off is over as one that ended itself: its reward is all that it will get.

    Args:
        rewards: reward of each token, [responses, tokens].
        values: values before each token, of the same shape.
        mask: 1 for a response's tokens, 0 for padding on the right.
        discount: γ, the weight of what comes one token later.
        decay: λ, the weight of longer estimates; 1: no bootstrapping from values.

    Returns:
        Advantages and returns, both of the same shape and 0 for padding.

    """
    values = values * mask
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    surprises = (rewards + discount * following - values) * mask
    advantages = torch.zeros_like(values)
    last = torch.zeros_like(values[:, 0])
    for place in reversed(range(values.shape[1])):
        advantages[:, place] = last = surprises[:, place] + discount * decay * last
    return advantages, advantages + values


def whitened(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalise advantages to mean 0 and variance 1 over all tokens of the batch; padding stays 0."""
    tokens = mask.sum()
    mean = (advantages * mask).sum() / tokens
    variance = ((advantages - mean).square() * mask).sum() / (tokens - 1).clamp(min=1)
    return (advantages - mean) * torch.rsqrt(variance + _LEAST_VARIANCE) * mask
