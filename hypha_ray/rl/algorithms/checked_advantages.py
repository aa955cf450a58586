"""Contract of advantages, `rl.advantage`: a function of all rewards of a batch, and checks of what it returns.

    function(rewards, lengths) ──► advantages

Each of them is [prompts, group], and a reward that is NaN is absent. Only `gae` is no such function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.plugins import create

Advantages: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of rewards and of lengths in tokens."""
_CLOSE = 1e-5
"""Largest difference of advantages that are equal but for rounding."""
_TRIED = ((1.0, 0.0, 0.5, 0.25), (0.0, 2.0, 1.0, 1.0))
"""Rewards of two groups that a function is tried with."""
_LENGTHS = ((3.0, 4.0, 5.0, 6.0), (2.0, 8.0, 4.0, 1.0))


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
    try:
        advantages = function(rewards, lengths)
    except Exception as error:  # Code of users may raise anything.
        raise _refused(name, reason_of(error), allowed) from error
    if not isinstance(advantages, torch.Tensor):
        raise _refused(name, type(advantages).__name__, allowed)
    if advantages.shape != rewards.shape:
        raise _refused(name, str(list(advantages.shape)), allowed)
    absent = rewards.isnan()
    if not advantages[~absent].isfinite().all():
        raise _refused(name, "a number that isn't finite, of a reward that is there", allowed)
    return advantages.masked_fill(absent, 0.0) if absent.any() else advantages


def try_advantages(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a function on some rewards, as `check_advantages`."""
    check_advantages(name, options, apart=False)


def check_advantages(name: str, options: Mapping[str, Any] | None, apart: bool) -> None:
    """Try a function on some rewards.

    Args:
        name: value of `rl.advantage`.
        options: value of `rl.advantage_options`.
        apart: whether the advantages of a group may not depend on other groups.

    Raises:
        ConfigError: RL031, the function fails, or absent rewards have a part in the advantages of others.

    """
    function: Advantages = create("advantages", name, options)
    rewards = torch.tensor(_TRIED)
    lengths = torch.tensor(_LENGTHS)
    present = torch.tensor([True, False, True, True])
    absent = rewards[:1].masked_fill(~present, torch.nan)
    beside = advantages_of(name, function, absent, lengths[:1])[:, present]
    alone = advantages_of(name, function, rewards[:1, present], lengths[:1, present])
    if not _are_close(beside, alone):
        fix = "leave NaN out of sums, means and sizes, as torch.nanmean does"
        raise _refused(name, "others beside an absent reward", "advantages of the other rewards alone", fix)
    together = advantages_of(name, function, rewards, lengths)
    single = [advantages_of(name, function, rewards[row, None], lengths[row, None]) for row in range(len(rewards))]
    if apart and not _are_close(together, torch.cat(single)):
        fix = "choose one of a group by itself: each worker sees a part of the prompts"
        raise _refused(name, "others beside another group", "advantages of each group alone, in synchronous steps", fix)


def _are_close(advantages: torch.Tensor, others: torch.Tensor) -> bool:
    return bool(torch.allclose(advantages.double(), others.double(), rtol=_CLOSE, atol=_CLOSE))


def _refused(name: str, got: str, allowed: str, fix: str | None = None) -> ConfigError:
    fix = fix or "see the contract of advantages in docs/plugins-training.md"
    return ConfigError("RL031", f"rl.advantage {name} gives no advantages", got, allowed, fix)
