"""Advantages of responses and of tokens, and the contract of `rl.advantage`.

    function(rewards, lengths) ──► advantages

Rewards, lengths and advantages are [prompts, group]. A reward that is NaN is absent: its advantage is 0, and it has no
part in any mean, size or deviation. Only `gae` is no such function: it has a critic's values as inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.plugins import create

_LEAST_STD = 1e-6
_LEAST_VARIANCE = 1e-8
_LEAST_STD_OF_BATCH = 1e-4
Advantages: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of rewards and of lengths in tokens."""
_CLOSE = 1e-5
"""Largest difference of advantages that differ only by rounding."""
_TRIED = ((1.0, 0.0, 0.5, 0.25), (0.0, 2.0, 1.0, 1.0))
"""Rewards of two groups, for the trial of a function."""
_LENGTHS = ((3.0, 4.0, 5.0, 6.0), (2.0, 8.0, 4.0, 1.0))


def group_std(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Divide each reward's distance to its group's mean by the group's standard deviation (GRPO, arXiv 2402.03300).

    Args:
        rewards: [prompts, group]; NaN: absent.
        lengths: tokens of each response, [prompts, group]; unused.

    Returns:
        [prompts, group]; zeros for a group of equal rewards, and for absent ones.

    """
    centered = group_mean(rewards, lengths)
    degrees_of_freedom = (_sizes(rewards) - 1).clamp(min=1)
    variance = centered.square().sum(1, keepdim=True) / degrees_of_freedom
    return centered / (variance.sqrt() + _LEAST_STD)


def group_mean(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the group's mean from each reward (Dr. GRPO, arXiv 2503.20783); arguments as in `group_std`."""
    return (rewards - _means(rewards)).nan_to_num()


def leave_one_out(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the group's other rewards (RLOO, arXiv 2402.14740); arguments as in `group_std`."""
    sizes = _sizes(rewards)
    other_count = (sizes - 1).clamp(min=1)
    return group_mean(rewards, lengths) * (sizes / other_count)


def batch_std(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract the group's mean, then normalise over all tokens of the batch (REINFORCE++, arXiv 2501.03262).

    Arguments are those of `group_std`; a response counts once for each of its tokens.
    """
    centered = group_mean(rewards, lengths)
    is_present = ~rewards.isnan()
    weights = lengths * is_present
    tokens = weights.sum()
    mean = (centered * weights).sum() / tokens.clamp(min=1)
    squares = (centered - mean) ** 2 * weights
    variance = squares.sum() / (tokens - 1).clamp(min=1)
    return (centered - mean) * torch.rsqrt(variance + _LEAST_VARIANCE) * is_present


def batch_scale(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Divide each reward's distance to its group's mean by the deviation of all rewards (arXiv 2508.08221).

    This is `scale_rewards = "batch"` of trl; arguments are those of `group_std`.
    """
    present_rewards = rewards[~rewards.isnan()]
    deviation = present_rewards.std() if len(present_rewards) > 1 else torch.zeros_like(rewards[0, 0])
    return group_mean(rewards, lengths) / (deviation + _LEAST_STD_OF_BATCH)


def equal_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Return whether the present rewards of a group are all equal, [prompts]; true if there is none or one."""
    low, high = _bounds(rewards)
    return (low >= high).squeeze(1)


def compared_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Return whether a group has two rewards or more, [prompts]."""
    return _sizes(rewards).squeeze(1) > 1


def _sizes(rewards: torch.Tensor) -> torch.Tensor:
    """Number of present rewards of each group, [prompts, 1]."""
    is_present = ~rewards.isnan()
    return is_present.sum(1, keepdim=True).to(rewards)


def _means(rewards: torch.Tensor) -> torch.Tensor:
    """Means of groups, [prompts, 1], clamped to the group's rewards, so that the mean of equal rewards equals them.

    Otherwise GRPO would divide one rounding error by another for a group of equal rewards.
    """
    return rewards.nanmean(1, keepdim=True).clamp(*_bounds(rewards))


def _bounds(rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest reward of each group, [prompts, 1]; ∞ and -∞ for one without any."""
    low = rewards.nan_to_num(math.inf).amin(1, keepdim=True)
    high = rewards.nan_to_num(-math.inf).amax(1, keepdim=True)
    return low, high


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, discount: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantages (arXiv 1506.02438), and returns for the critic to learn.

    A response that was cut off counts as ended: there is no value after its last token.

    Args:
        rewards: reward of each token, [responses, tokens].
        values: values before each token, of the same shape.
        mask: 1 for a response's tokens, 0 for padding on the right.
        discount: γ, the weight of rewards and values one token later.
        decay: λ, the weight of longer estimates; 1: no bootstrapping from values.

    Returns:
        Advantages and returns, both of the same shape and 0 for padding.

    """
    values = values * mask
    zeros = torch.zeros_like(values[:, :1])
    following = torch.cat([values[:, 1:], zeros], 1)
    errors = (rewards + discount * following - values) * mask
    advantages = torch.zeros_like(values)
    next_advantage = torch.zeros_like(values[:, 0])
    for token in reversed(range(values.shape[1])):
        next_advantage = errors[:, token] + discount * decay * next_advantage
        advantages[:, token] = next_advantage
    return advantages, advantages + values


def whitened(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalise advantages to mean 0 and variance 1 over all tokens of the batch; padding stays 0."""
    tokens = mask.sum()
    mean = (advantages * mask).sum() / tokens
    squares = (advantages - mean).square() * mask
    variance = squares.sum() / (tokens - 1).clamp(min=1)
    return (advantages - mean) * torch.rsqrt(variance + _LEAST_VARIANCE) * mask


def advantages_of(name: str, function: Advantages, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the advantages of a batch; those of absent rewards are 0.

    Args:
        name: value of `rl.advantage`.
        function: function of that name.
        rewards: [prompts, group]; NaN: absent.
        lengths: tokens of each response, [prompts, group].

    Raises:
        ConfigError: RL031, the function raises, or returns something else.

    """
    allowed = f"finite numbers, {list(rewards.shape)}"
    is_absent = rewards.isnan()
    try:
        advantages = function(rewards.clone(), lengths.clone())  # Code of users may change what it gets.
    except (Exception, SystemExit) as error:  # Code of users may raise anything.
        raise _refusal(name, reason_of(error), allowed) from error
    if not isinstance(advantages, torch.Tensor):
        raise _refusal(name, type(advantages).__name__, allowed)
    if advantages.is_complex():
        raise _refusal(name, str(advantages.dtype).removeprefix("torch."), allowed)
    if advantages.shape != rewards.shape:
        raise _refusal(name, str(list(advantages.shape)), allowed)
    advantages = advantages.detach()
    is_finite = advantages.isfinite() | is_absent
    if not is_finite.all():
        raise _refusal(name, "a number that isn't finite, of a reward that is there", allowed)
    return advantages.masked_fill(is_absent, 0.0) if is_absent.any() else advantages


def try_advantages(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a function on some rewards, as `check_advantages`."""
    check_advantages(name, options, must_be_separate=False)


def check_advantages(name: str, options: Mapping[str, Any] | None, must_be_separate: bool) -> None:
    """Try a function on some rewards.

    Args:
        name: value of `rl.advantage`.
        options: value of `rl.advantage_options`.
        must_be_separate: whether the advantages of a group may not depend on other groups.

    Raises:
        ConfigError: RL031, the function fails, or absent rewards have a part in the advantages of others.

    """
    function: Advantages = create("advantages", name, options)
    rewards = torch.tensor(_TRIED)
    lengths = torch.tensor(_LENGTHS)
    is_present = torch.tensor([True, False, True, True])
    absent = rewards[:1].masked_fill(~is_present, torch.nan)
    with_absent = advantages_of(name, function, absent, lengths[:1])[:, is_present]
    without_absent = advantages_of(name, function, rewards[:1, is_present], lengths[:1, is_present])
    if not _are_close(with_absent, without_absent):
        fix = "leave NaN out of sums, means and sizes, as torch.nanmean does"
        raise _refusal(name, "others beside an absent reward", "advantages of the other rewards alone", fix)
    joint_advantages = advantages_of(name, function, rewards, lengths)
    single_advantages: list[torch.Tensor] = []
    for row in range(len(rewards)):
        single_advantages.append(advantages_of(name, function, rewards[row, None], lengths[row, None]))
    if must_be_separate and not _are_close(joint_advantages, torch.cat(single_advantages)):
        fix = "choose one of a group by itself: each worker sees a part of the prompts"
        raise _refusal(name, "others beside another group", "advantages of each group alone, in synchronous steps", fix)


def _are_close(advantages: torch.Tensor, expected_advantages: torch.Tensor) -> bool:
    return bool(torch.allclose(advantages.double(), expected_advantages.double(), rtol=_CLOSE, atol=_CLOSE))


def _refusal(name: str, got: str, allowed: str, fix: str | None = None) -> ConfigError:
    fix = fix or "see the contract of advantages in docs/plugins-training.md"
    return ConfigError("RL031", f"rl.advantage {name} gives no advantages", got, allowed, fix)
