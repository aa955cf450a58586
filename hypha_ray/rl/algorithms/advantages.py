"""Advantages of responses, from the rewards of all responses to the same prompt.

A reward that is NaN is absent: its advantage is 0, and it has no part in any mean, size or deviation.
"""

from __future__ import annotations

import math

import torch

_LEAST_STD = 1e-6
_LEAST_VARIANCE = 1e-8


def group_std(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Divide each reward's distance to its group's mean by the group's standard deviation (GRPO, arXiv 2402.03300).

    Args:
        rewards: [prompts, group]; NaN: absent.
        lengths: tokens of each response, [prompts, group]; unused.

    Returns:
        [prompts, group]; zeros for a group of equal rewards, and for absent ones.

    """
    centered = group_mean(rewards, lengths)
    variance = centered.square().sum(1, keepdim=True) / (_sizes(rewards) - 1).clamp(min=1)
    return centered / (variance.sqrt() + _LEAST_STD)


def group_mean(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the group's mean from each reward (Dr. GRPO, arXiv 2503.20783); arguments as in `group_std`."""
    return (rewards - _means(rewards)).nan_to_num()


def leave_one_out(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the group's other rewards (RLOO, arXiv 2402.14740); arguments as in `group_std`."""
    sizes = _sizes(rewards)
    return group_mean(rewards, lengths) * (sizes / (sizes - 1).clamp(min=1))


def batch_std(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the group's mean, then normalise over all tokens of the batch (REINFORCE++, arXiv 2501.03262).

    Arguments are those of `group_std`; a response counts once for each of its tokens.
    """
    centered = group_mean(rewards, lengths)
    there = ~rewards.isnan()
    weights = lengths * there
    tokens = weights.sum()
    mean = (centered * weights).sum() / tokens.clamp(min=1)
    variance = ((centered - mean) ** 2 * weights).sum() / (tokens - 1).clamp(min=1)
    return (centered - mean) * torch.rsqrt(variance + _LEAST_VARIANCE) * there


def equal_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Return whether the rewards of a group that are there are all equal, [prompts]; true if there is none or one."""
    low, high = _bounds(rewards)
    return (low >= high).squeeze(1)


def compared_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Return whether a group has two rewards or more, [prompts]."""
    return _sizes(rewards).squeeze(1) > 1


def _sizes(rewards: torch.Tensor) -> torch.Tensor:
    """Numbers of rewards that are there, [prompts, 1]."""
    return (~rewards.isnan()).sum(1, keepdim=True).to(rewards)


def _means(rewards: torch.Tensor) -> torch.Tensor:
    """Means of groups, [prompts, 1]: never beyond the rewards by rounding, so that the mean of equal ones equals them.

    Without this, GRPO divides the rounding of a group of equal rewards by a deviation that is as small.
    """
    return rewards.nanmean(1, keepdim=True).clamp(*_bounds(rewards))


def _bounds(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest reward of each group, [prompts, 1]; ∞ and -∞ for one without any."""
    low = rewards.nan_to_num(math.inf).amin(1, keepdim=True)
    high = rewards.nan_to_num(-math.inf).amax(1, keepdim=True)
    return low, high
