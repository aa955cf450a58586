"""Advantages of responses, from the rewards of all responses to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

_LEAST_STD = 1e-6
_LEAST_VARIANCE = 1e-8


def present(rewards: torch.Tensor) -> torch.Tensor:
    """Replace an absent reward by the mean of its group, so that its advantage is 0; 0 for a group without any.

    Args:
        rewards: [prompts, group]; NaN: absent.

    """
    return torch.where(rewards.isnan(), _means(rewards), rewards).nan_to_num()


def group_std(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Divide each reward's distance to its group's mean by the group's standard deviation (GRPO, arXiv 2402.03300).

    Args:
        rewards: [prompts, group].
        lengths: tokens of each response, [prompts, group]; unused.

    Returns:
        [prompts, group]; zeros for a group of equal rewards.

    """
    return group_mean(rewards, lengths) / (rewards.std(1, keepdim=True) + _LEAST_STD)


def group_mean(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the group's mean from each reward (Dr. GRPO, arXiv 2503.20783); arguments as in `group_std`."""
    return rewards - _means(rewards)


def leave_one_out(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the group's other rewards (RLOO, arXiv 2402.14740); arguments as in `group_std`."""
    size = rewards.shape[1]
    return group_mean(rewards, lengths) * (size / (size - 1))


def batch_std(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the group's mean, then normalise over all tokens of the batch (REINFORCE++, arXiv 2501.03262).

    Arguments are those of `group_std`; a response counts once for each of its tokens.
    """
    centered, tokens = group_mean(rewards, lengths), lengths.sum()
    mean = (centered * lengths).sum() / tokens
    variance = ((centered - mean) ** 2 * lengths).sum() / (tokens - 1).clamp(min=1)
    return (centered - mean) * torch.rsqrt(variance + _LEAST_VARIANCE)


def _means(rewards: torch.Tensor) -> torch.Tensor:
    """Means of groups, [prompts, 1]: never beyond the rewards by rounding, so that the mean of equal ones equals them.

    Without this, GRPO divides the rounding of a group of equal rewards by a deviation that is as small.
    """
    low = rewards.nan_to_num(math.inf).amin(1, keepdim=True)
    high = rewards.nan_to_num(-math.inf).amax(1, keepdim=True)
    return rewards.nanmean(1, keepdim=True).clamp(low, high)


ADVANTAGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
}
"""Functions of `rl.advantage` that need no critic."""
