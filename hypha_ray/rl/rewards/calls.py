"""Reward functions: lookup by name, calls on one response, and the consequences of failed calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from hypha_ray import plugins
from hypha_ray.config.tables.rewards import Deadline
from hypha_ray.errors import ConfigError, HyphaError, reason_of
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
"""Names of the functions of a task, for tasks that haven't all functions."""


def functions_of(response: Response, tasks: Tasks, every: Sequence[str]) -> Sequence[str]:
    """Names of the functions that reward a response: those of its task, or every one."""
    task = str(response.data.get("task"))
    return tasks.get(task, every)


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


Row: TypeAlias = tuple[float | ConfigError | None, ...]
"""Reward of a response by each function, NaN if absent; an error if the function failed, None if it is of another
task."""
LARGEST = 1e15
"""Largest size of a reward: squares of larger numbers may be infinite in the model's dtype."""

log = logging.getLogger(__name__)


class Calls:
    """Functions of a job, loaded in this process.

    Args:
        names: functions.
        tasks: functions of single tasks.

    Raises:
        ConfigError: RWD003, RWD004, one can't be had.

    """

    def __init__(self, names: Sequence[str], tasks: Tasks) -> None:
        self._names = tuple(names)
        self._tasks = tasks
        self._functions = {name: reward_of(name) for name in names}

    def row(self, response: Response, begins: Callable[[str], None] = lambda name: None) -> Row:
        """Return the result of each function; `begins` is called with its name before each."""
        names = functions_of(response, self._tasks, self._names)
        row: list[float | ConfigError | None] = []
        for name, function in self._functions.items():
            if name not in names:
                row.append(None)
                continue
            begins(name)
            row.append(_reward_or_error(name, function, response))
        return tuple(row)


def _reward_or_error(name: str, function: Reward, response: Response) -> float | ConfigError:
    """Call a function; return NaN if it gives no number, and its error if it fails."""
    try:
        return _number(function(response))
    except HyphaError:
        raise
    except (Exception, SystemExit) as error:  # A function of users may raise anything.
        reason = reason_of(error)
        text = response.text[:80]
        prompt = response.prompt[-80:]
        fix = f"mend the function; the response was {text!r} to {prompt!r}"
        return ConfigError("RWD001", f"reward function {name} failed", reason, "a number or None", fix)


def _number(result: object) -> float:
    """Return the result of a reward function as a number; NaN if it is None, not finite, or too large."""
    if result is None:
        return math.nan
    if isinstance(result, str | bytes | bytearray):
        beginning = result[:80]
        raise TypeError(f"it gave the text {beginning!r}")
    number = float(result)  # type: ignore[arg-type]  # It raises a TypeError itself.
    return number if abs(number) <= LARGEST else math.nan


class Failures:
    """Decides whether failures of functions end the run, or are absent rewards of single responses."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def settle(
        self, names: Sequence[str], rows: Sequence[Row], responses: Sequence[Response]
    ) -> list[tuple[float, ...]]:
        """Return the rewards of responses, NaN if absent.

        Raises:
            ConfigError: RWD001, a function failed for every response to more than one prompt, or for all responses.

        """
        for number, name in enumerate(names):
            prompts: set[str] = set()
            errors: list[ConfigError] = []
            calls = 0
            for row, response in zip(rows, responses, strict=True):
                cell = row[number]
                if cell is None:  # A function of another task.
                    continue
                calls += 1
                prompts.add(response.prompt)
                if isinstance(cell, ConfigError):
                    errors.append(cell)
            if not errors:
                continue
            always_fails = len(errors) == calls
            if always_fails and (len(prompts) > 1 or calls == len(responses)):
                raise errors[0]
            if name not in self._logged:
                self._logged.add(name)
                log.warning("a response has no reward, which is told once: %s", errors[0])
        rewards: list[tuple[float, ...]] = []
        for row in rows:
            rewards.append(tuple(cell if isinstance(cell, float) else math.nan for cell in row))
        return rewards
