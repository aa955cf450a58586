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


Row: TypeAlias = tuple[float | ConfigError | None, ...]
"""Rewards of a response by each function, NaN if absent; an error of a function that failed, None for one that isn't of
the response's task."""
LARGEST = 1e15
"""Size up to which a number is a reward: the squares of larger ones may be infinite in the model's own numbers."""

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
        """Return what each function gives; `begins` is told the name of each before it is called."""
        own = functions_of(response, self._tasks, self._names)
        row: list[float | ConfigError | None] = []
        for name, function in self._functions.items():
            if name not in own:
                row.append(None)
                continue
            begins(name)
            row.append(_called(name, function, response))
        return tuple(row)


def _called(name: str, function: Reward, response: Response) -> float | ConfigError:
    """Call a function; return NaN if it gives no number, and its error if it fails."""
    try:
        return _number(function(response))
    except HyphaError:
        raise
    except (Exception, SystemExit) as error:  # A function of users may raise anything.
        reason = reason_of(error)
        given = f"the response was {response.text[:80]!r} to {response.prompt[-80:]!r}"
        return ConfigError(
            "RWD001", f"reward function {name} failed", reason, "a number or None", f"mend the function; {given}"
        )


def _number(given: object) -> float:
    """Return a number that is a reward; NaN for None, for no finite number and for one that is too large."""
    if isinstance(given, str | bytes | bytearray):
        raise TypeError(f"it gave the text {given[:80]!r}")
    number = math.nan if given is None else float(given)  # type: ignore[arg-type]  # It raises a TypeError itself.
    return number if abs(number) <= LARGEST else math.nan


class Failures:
    """Decides what the failures of functions mean: one that fails for an odd response has no reward for that."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def settle(
        self, names: Sequence[str], rows: Sequence[Row], responses: Sequence[Response]
    ) -> list[tuple[float, ...]]:
        """Return the rewards of responses, NaN if absent.

        Raises:
            ConfigError: RWD001, a function failed for every response to more than one prompt, or for all responses.

        """
        for number, name in enumerate(names):
            cells = [(row[number], response) for row, response in zip(rows, responses, strict=True)]
            asked = [(cell, response) for cell, response in cells if cell is not None]
            errors = [cell for cell, _ in asked if isinstance(cell, ConfigError)]
            if not errors:
                continue
            several = len({response.prompt for _, response in asked}) > 1 or len(asked) == len(cells)
            if several and len(errors) == len(asked):
                raise errors[0]
            if name not in self._told:
                self._told.add(name)
                log.warning("a response has no reward, which is told once: %s", errors[0])
        return [tuple(cell if isinstance(cell, float) else math.nan for cell in row) for row in rows]
