"""Lookup of reward functions: by name, or as ``module:function`` beside the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from hypha_ray import plugins
from hypha_ray.config.tables.rewards import Deadline
from hypha_ray.families import REWARDS
from hypha_ray.plugins import create
from hypha_ray.rl.rewards.response import Response, Reward

SLOW = frozenset({"math", "code"})
"""Registered functions that may take long; the others are as fast as comparisons of texts."""
LIMITS_S = {"math": 10.0}
"""Default time limits of registered functions, in seconds; `code` has limits of its own."""
OWN_LIMIT_S = 60.0
"""Default time limit of a user's function, in seconds."""

Tasks: TypeAlias = Mapping[str, Sequence[str]]
"""Names of the functions of those tasks that haven't all of them."""


def functions_of(response: Response, tasks: Tasks, every: Sequence[str]) -> Sequence[str]:
    """Names of the functions that reward a response: those of its task, or every one."""
    return tasks.get(str(response.data.get("task")), every)


def limit_of(name: str, deadline_s: Deadline) -> float | None:
    """Time limit of a function in seconds, by `rl.reward.deadline_s`; None: the worker's own process calls it."""
    registered = name in REWARDS.members
    if deadline_s == "none" or (registered and name not in SLOW):
        return None
    if deadline_s is not None:
        return deadline_s
    return LIMITS_S.get(name) if registered else OWN_LIMIT_S


def reward_of(name: str) -> Reward:
    """The reward function of a name, or ``module:function``.

    Raises:
        ConfigError: RWD003 unknown name, RWD004 module or function that can't be had.

    """
    function: Reward = create("rewards", name)
    return function


def require_known(names: Sequence[str]) -> None:
    """Refuse a name that is neither registered nor ``module:function``.

    Raises:
        ConfigError: RWD003.

    """
    for name in names:
        plugins.require_known("rewards", name)
