"""Lookup of reward functions: by name, or as ``module:function`` beside the job."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hypha_ray.config.tables.rewards import JUDGE, MODEL, Deadline
from hypha_ray.errors import ConfigError
from hypha_ray.rl.rewards import code, mathematics, text
from hypha_ray.rl.rewards.response import Response, Reward

REWARDS: dict[str, Reward] = {
    "exact": text.exact,
    "positions": text.positions,
    "contains": text.contains,
    "number": text.number,
    "format": text.boxed,
    "length": text.length,
    "math": mathematics.equal,
    "code": code.passes,
}
"""Reward functions by name."""

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
    registered = name in REWARDS
    if deadline_s == "none" or (registered and name not in SLOW):
        return None
    if deadline_s is not None:
        return deadline_s
    return LIMITS_S.get(name) if registered else OWN_LIMIT_S


def look_beside_the_job() -> None:
    """Let a driver find modules of its working directory first, as Ray lets its actors, whose own is another."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def reward_of(name: str) -> Reward:
    """The reward function of a name, or ``module:function``.

    Raises:
        ConfigError: RWD003 unknown name, RWD004 module or function that can't be had.

    """
    require_known([name])
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.partition(":")
    return _own(module, function)


def require_known(names: Sequence[str]) -> None:
    """Refuse a name that is neither registered nor ``module:function``.

    Raises:
        ConfigError: RWD003.

    """
    for name in names:
        if name not in REWARDS and not all(name.partition(":")):
            known = [*REWARDS, JUDGE, MODEL]
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else "for a function of your own write module:function"
            raise ConfigError("RWD003", "there is no such reward function", repr(name), ", ".join(known), fix)


def _own(module: str, name: str) -> Reward:
    """Load a user's function."""
    where = f"reward function {module}:{name} can't be loaded"
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # A module of users may raise anything.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fix = f"put {module.partition('.')[0]}.py into the job's working directory, and try to import it"
        raise ConfigError("RWD004", where, reason, fix=fix) from error
    if not callable(found):
        got = "nothing of that name" if found is None else type(found).__name__
        raise ConfigError("RWD004", where, got, "a function of one argument", f"define {name} in {module}")
    function: Reward = found
    return function
