"""Reward functions: lookup by name, calls on responses, consequences of failed calls, and a process that makes calls.

That process can be killed by the one that asks it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from hypha_ray import plugins
from hypha_ray.config.rl import SLOW, Deadline
from hypha_ray.errors import ConfigError, HyphaError, reason_of
from hypha_ray.families import REWARDS
from hypha_ray.plugins import create
from hypha_ray.rl.call_process import START_S, CallProcess, Code, Service, serve
from hypha_ray.rl.rewards import registered
from hypha_ray.rl.rewards.response import Response
from hypha_ray.rl.rewards.signatures import RewardFunction, Signature, reward_from

LIMITS_S = {"math": 10.0}
"""Default time limits of registered functions, in seconds; `code` has limits of its own."""
_FAILED = "RWD001"
OWN_LIMIT_S = 60.0
"""Default time limit of a user's function, in seconds."""

Tasks: TypeAlias = Mapping[str, Sequence[str]]
"""Names of the functions of a task, for tasks that haven't all functions."""
Row: TypeAlias = tuple[float | ConfigError | None, ...]
"""Reward of a response by each function, NaN if absent; an error if the function failed, None if it is of another
task."""
Signatures: TypeAlias = Mapping[str, Signature]
"""Signatures of functions by their names."""

log = logging.getLogger(__name__)


def functions_of(response: Response, tasks: Tasks, all_names: Sequence[str]) -> Sequence[str]:
    """Names of the functions that reward a response: those of its task, or every one."""
    task = str(response.data.get("task"))
    return tasks.get(task, all_names)


def limit_of(name: str, deadline_s: Deadline) -> float | None:
    """Time limit of a function in seconds, by `rl.reward.deadline_s`; None: the worker's own process calls it."""
    registered = name in REWARDS.members
    if deadline_s == "none" or (registered and name not in SLOW):
        return None
    if deadline_s is not None:
        return deadline_s
    return LIMITS_S.get(name) if registered else OWN_LIMIT_S


def reward_of(name: str) -> Any:
    """The reward function of a name, or ``module:function``.

    Raises:
        ConfigError: RWD003 unknown name, RWD004 module or function that can't be had, or a class that can't be made.

    """
    try:
        return create("rewards", name)
    except HyphaError:
        raise
    except (Exception, SystemExit) as error:  # A constructor of users may raise anything.
        fix = "a class is made without arguments; mend its constructor"
        raise ConfigError("RWD004", f"reward function {name} can't be made", reason_of(error), fix=fix) from None


def require_known(names: Sequence[str]) -> None:
    """Refuse a name that is neither registered nor ``module:function``.

    Raises:
        ConfigError: RWD003.

    """
    for name in names:
        plugins.require_known("rewards", name)


class Unit(NamedTuple):
    """Calls that are made one after the other: of functions that take one response, or all responses to a prompt."""

    columns: tuple[int, ...]
    """Numbers of the functions."""
    rows: tuple[int, ...]
    """Numbers of the responses, which are to one prompt."""


def take_groups(signatures: Signatures) -> bool:
    """Whether any of these functions takes all responses to a prompt at once."""
    return any(signature.takes_group for signature in signatures.values())


def units_of(signatures: Signatures, responses: Sequence[Response]) -> list[Unit]:
    """Divide the calls of functions on responses; those to one prompt are neighbours and share its record."""
    group_columns: list[int] = []
    other_columns: list[int] = []
    for column, signature in enumerate(signatures.values()):
        columns = group_columns if signature.takes_group else other_columns
        columns.append(column)
    units: list[Unit] = []
    for _, group in groupby(range(len(responses)), lambda row: id(responses[row].data)):
        rows = tuple(group)
        if other_columns:
            units += [Unit(tuple(other_columns), (row,)) for row in rows]
        if group_columns:
            units.append(Unit(tuple(group_columns), rows))
    return units


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
        self._functions = {name: RewardFunction(name, reward_of(name)) for name in names}
        self.signatures: Signatures = {name: function.signature for name, function in self._functions.items()}
        """Signatures of the functions."""

    def rows(
        self,
        columns: Sequence[int],
        responses: Sequence[Response],
        begins: Callable[[str], None] = lambda name: None,
    ) -> list[Row]:
        """Return the results of some functions for responses to one prompt.

        Args:
            columns: numbers of the functions.
            responses: the responses.
            begins: function that is called with the name of each function before that is.

        """
        names_of_task = functions_of(responses[0], self._tasks, self._names)
        cells: list[list[float | ConfigError | None]] = []
        for column in columns:
            name = self._names[column]
            if name in names_of_task:
                begins(name)
                given = responses if name in REWARDS.members else _with_own_record(responses)
                cells.append(_rewards_or_errors(name, self._functions[name], given))
            else:
                cells.append([None] * len(responses))
        return list(zip(*cells, strict=True))


def _with_own_record(responses: Sequence[Response]) -> list[Response]:
    """Return responses to one prompt with a copy of its record, which a user's function may change."""
    record = deepcopy(responses[0].data)
    return [replace(response, data=record) for response in responses]


def _rewards_or_errors(
    name: str, function: RewardFunction, responses: Sequence[Response]
) -> list[float | ConfigError | None]:
    """Call a function; return its rewards, NaN for no number, and its error for each response that it fails for."""
    try:
        results = function.results(responses)
    except HyphaError as error:
        if not isinstance(error, ConfigError) or error.code != _FAILED:
            raise
        results = [error] * len(responses)
    except (Exception, SystemExit) as error:  # A function of users may raise anything.
        results = [error] * len(responses)
    cells: list[float | ConfigError | None] = []
    for result, response in zip(results, responses, strict=True):
        cells.append(_reward_or_error(name, result, response))
    return cells


def _reward_or_error(name: str, result: Any, response: Response) -> float | ConfigError:
    """Return the reward that a function gave; NaN if it gave no number, and an error if it raised or gave nonsense."""
    if isinstance(result, HyphaError):
        if isinstance(result, ConfigError) and result.code == _FAILED:
            return result
        raise result
    if not isinstance(result, BaseException):
        try:
            return reward_from(result)
        except Exception as error:  # An object of users may raise anything as it becomes a number.
            result = error
    return failed_call(name, reason_of(result), response)


def failed_call(name: str, reason: str, response: Response, remedy: str = "mend the function") -> ConfigError:
    """The error of a function that gave nothing useful for a response."""
    text = response.text[:80]
    prompt = response.prompt[-80:]
    fix = f"{remedy}; the response was {text!r} to {prompt!r}"
    allowed = "a number or None, or a dictionary of them"
    return ConfigError(_FAILED, f"reward function {name} failed", reason, allowed, fix)


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


class RewardProcess(CallProcess):
    """Child process that evaluates one response, or the responses to one prompt, at a time.

    Args:
        names: functions that it loads.
        tasks: functions of single tasks.
        start_s: longest time to load them.

    Raises:
        ConfigError: RWD003, RWD004, a function can't be had, or not in time.

    """

    def __init__(self, names: Sequence[str], tasks: Tasks, start_s: float = START_S) -> None:
        self.called = ""
        """Name of the function that was called last; empty before the first."""
        code = Code("reward functions", ", ".join(names), "RWD004", f"{__name__}:_serve")
        super().__init__(code, (tuple(names), dict(tasks)), start_s)
        self.signatures: Signatures = self.greeting
        """Signatures of the functions."""

    def ask(self, unit: Unit, responses: Sequence[Response]) -> None:
        """Send the responses of a unit among all; if the process is dead, `receive` returns None."""
        self.called = ""
        self.send((unit.columns, [responses[row] for row in unit.rows]))

    def receive(self) -> list[Row] | str | Any:
        """Return the rows of a unit, or the name of a function that is called now; None if the process died instead.

        Raises:
            HyphaError: an error that the process answered with.

        """
        answer = super().receive()
        if isinstance(answer, str):
            self.called = answer
        return answer


def _serve() -> None:
    """Answer requests from standard input."""
    serve(_load)


def _load(message: Any) -> Service:
    names, tasks = message
    calls = Calls(names, tasks)
    if "math" in names:
        registered.warm_up()

    def answer(request: Any, begins: Callable[[object], None]) -> object:
        columns, responses = request
        return calls.rows(columns, responses, begins)

    return Service(calls.signatures, answer)
