"""Signatures of reward functions, found by inspection, and calls of functions of each signature.

    def f(response)                 one response: a `Response`
    def f(completions, **columns)   the responses to a prompt: trl's names, given by name

Either may be a coroutine function, and either may give a dictionary of figures in place of a number.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Final, Self

from hypha_ray.errors import ConfigError
from hypha_ray.families import REWARDS
from hypha_ray.plugins import takes_by_name
from hypha_ray.rl.rewards.response import Response
from hypha_ray.texts import counted

LARGEST = 1e15
"""Largest size of a reward: squares of larger numbers may be infinite in the model's dtype."""
_STATE: Final = "trainer_state"
"""Argument that has the progress of the run; absent outside of one."""
_OF_TRL: Final = (_STATE, "environments")
"""Arguments that trl has beside columns, and that aren't always here."""
_LOG: Final = "log_metric"
"""Argument that is a function of a name and a number, to be called by a reward function."""
_EXTRA: Final = "log_extra"
"""Argument that is a function of a name and a list with a value for each response, which records show."""
_TOTAL: Final = "reward"
"""Name of the figure that is the reward itself."""
_MOST_FIGURES = 32
"""Largest number of figures that a function gives for a response."""
_LONGEST = 1000
"""Largest number of characters of a value that a record shows."""
_NO_LIST = (str, bytes, bytearray, Mapping, Set)
"""Types whose elements aren't rewards in the order of responses."""


class PartedReward(float):
    """Reward of a response beside the figures that it was made of."""

    parts: Mapping[str, float]
    """Figures by name; NaN if absent."""
    extra: Mapping[str, Any] = MappingProxyType({})
    """Values by name that are shown with the response: numbers, texts, true, false or None."""

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Self:
        """Return the figure named ``reward``, or without one the sum of all figures, which is NaN if one is absent.

        Raises:
            TypeError: a name is no text, a figure is no number, or there are none or too many.

        """
        if not 0 < len(figures) <= _MOST_FIGURES:
            raise TypeError(f"it gave {len(figures)} figures")
        numbers: dict[str, float] = {}
        for name, figure in figures.items():
            if not isinstance(name, str) or not name.strip():
                raise TypeError(f"it gave a figure of the name {name!r}")
            numbers[name] = _number(figure)
        total = math.fsum(numbers.values())
        if _TOTAL in numbers:
            total = numbers.pop(_TOTAL)
        return cls.joined(total if abs(total) <= LARGEST else math.nan, numbers)

    @classmethod
    def joined(cls, total: float, parts: Mapping[str, float], extra: Mapping[str, Any] | None = None) -> Self:
        """Return a reward with figures and values to show."""
        reward = cls(total)
        reward.parts = parts
        reward.extra = extra or {}
        return reward


def reward_from(result: object) -> float:
    """Return the result of a reward function as a number; NaN if it is None, not finite, or too large.

    Raises:
        TypeError: it is a text, or something else that isn't a number or a dictionary of numbers.

    """
    if isinstance(result, PartedReward):
        return result
    if isinstance(result, Mapping):
        return PartedReward.of(result)
    return _number(result)


def _number(result: object) -> float:
    if result is None:
        return math.nan
    if isinstance(result, str | bytes | bytearray):
        beginning = result[:80]
        raise TypeError(f"it gave the text {beginning!r}")
    try:
        number = float(result)  # type: ignore[arg-type]  # float raises a TypeError itself.
    except OverflowError:  # A whole number or a fraction that no float can hold.
        return math.nan
    return number if abs(number) <= LARGEST else math.nan


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of a reward function."""

    keywords: frozenset[str] | None
    """Names that the function is called with, if it takes all responses to a prompt; empty: with any name. None: it
    takes one response."""
    required: tuple[str, ...]
    """Names of these without a default."""
    is_async: bool
    """Whether it is a coroutine function."""

    @property
    def takes_group(self) -> bool:
        """Whether a call is for all responses to a prompt: by trl's signature, or so that coroutines run together."""
        return self.keywords is not None or self.is_async

    @property
    def text(self) -> str:
        """Description for the user."""
        if self.keywords is None:
            calls = "for each response, with a Response"
        else:
            calls = "for all responses to a prompt, with completions and columns by name, as trl does"
        return f"a coroutine function, called {calls}" if self.is_async else f"called {calls}"


def signature_of(function: Any) -> Signature:
    """Return the signature of a function, or of an object that can be called."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # A function of C tells no signature.
        return Signature(None, (), is_async)
    if not takes_by_name(parameters, REWARDS.keywords):
        return Signature(None, (), is_async)
    kinds = inspect.Parameter
    names: list[str] = []
    required: list[str] = []
    takes_any = False
    for name, parameter in parameters.items():
        if parameter.kind is kinds.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            names.append(name)
            if parameter.default is kinds.empty:
                required.append(name)
    return Signature(frozenset() if takes_any else frozenset(names), tuple(required), is_async)


class RewardFunction:
    """Reward function of any signature. The coroutines of one all run in the same loop.

    Args:
        name: name of the function.
        function: the function.

    """

    def __init__(self, name: str, function: Any) -> None:
        self._name = name
        self._function = function
        self.signature = signature_of(function)
        self._runner: asyncio.Runner | None = None

    def results(self, responses: Sequence[Response]) -> list[Any]:
        """Return what the function gives for each of the responses to a prompt; an exception that it raised for it.

        Raises:
            ConfigError: RWD001, the records lack a column that the function needs.
            TypeError: it gave something else than one result for each response.
            Exception: whatever a function of all responses raises.

        """
        if self.signature.keywords is None:
            return self._results_one_by_one(responses)
        logs = _Logs(len(responses))
        arguments = self._arguments(responses, logs)
        result = self._function(**arguments)
        if inspect.isawaitable(result):
            result = self._run(_awaited(result))
        if isinstance(result, _NO_LIST) or not hasattr(result, "__iter__"):
            raise TypeError(f"it gave {type(result).__name__} and no list")
        results = list(result)
        if len(results) != len(responses):
            raise TypeError(f"it gave {counted(len(results), 'reward')} for {counted(len(responses), 'response')}")
        return logs.beside(results)

    def _results_one_by_one(self, responses: Sequence[Response]) -> list[Any]:
        if self.signature.is_async:
            calls = [self._function(response) for response in responses]
            together: list[Any] = self._run(_together(calls))
            return together
        results: list[Any] = []
        for response in responses:
            try:
                result = self._function(response)
                if inspect.isawaitable(result):  # A plain function around a coroutine function.
                    result = self._run(_awaited(result))
                results.append(result)
            except (Exception, SystemExit) as error:  # A function of users may raise anything.
                results.append(error)
        return results

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
            weakref.finalize(self, self._runner.close)
        return self._runner.run(coroutine)

    def _arguments(self, responses: Sequence[Response], logs: _Logs) -> dict[str, Any]:
        """Return what the function takes of the names that there are: trl's, and the columns of the records.

        Args:
            responses: responses to a prompt.
            logs: receiver of what the function logs.

        """
        arguments: dict[str, Any] = {}
        for column in responses[0].data:
            if column != _STATE:  # A function that finds it absent doesn't get a column of that name in its place.
                arguments[column] = [response.data[column] for response in responses]
        arguments["prompts"] = [response.prompt for response in responses]
        arguments["completions"] = [response.completion for response in responses]
        arguments[_LOG] = logs.metric
        arguments[_EXTRA] = logs.extra
        if responses[0].trainer_state is not None:
            arguments[_STATE] = responses[0].trainer_state
        arguments["completion_ids"] = [list(response.ids) for response in responses]
        for name in self.signature.required:
            if name not in arguments:
                raise self._missing(name, arguments)
        keywords = self.signature.keywords
        if not keywords:
            return arguments
        return {name: values for name, values in arguments.items() if name in keywords}

    def _missing(self, name: str, arguments: Mapping[str, Any]) -> ConfigError:
        if name in _OF_TRL:
            problem = f"reward function {self._name} needs an object of trl's trainer"
            fix = f"give the parameter a default: {name}=None"
            return ConfigError("RWD001", problem, repr(name), ", ".join(sorted(arguments)), fix)
        fix = f"prepare the dataset with --keep-columns {name}"
        matches = difflib.get_close_matches(name, arguments, n=1, cutoff=0.75)
        if matches:
            fix = f"did you mean {matches[0]!r}? Otherwise {fix}"
        problem = f"reward function {self._name} needs a column that the prompts' records lack"
        return ConfigError("RWD001", problem, repr(name), ", ".join(sorted(arguments)), fix)


class _Logs:
    """Receiver of what a function logs about the responses to a prompt."""

    def __init__(self, responses: int) -> None:
        self._responses = responses
        self._metrics: dict[str, list[float]] = {}
        self._extra: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        """Log a number; several of one name count by their mean.

        Raises:
            TypeError: there are too many names.

        """
        if name not in self._metrics and len(self._metrics) == _MOST_FIGURES:
            raise TypeError(f"log_metric got more than {_MOST_FIGURES} names")
        self._metrics.setdefault(str(name), []).append(float(value))

    def extra(self, column: str, values: Iterable[Any]) -> None:
        """Log a value for each response; a later call with the same name replaces the values.

        Raises:
            TypeError: the number of values isn't that of the responses.

        """
        shown_values = [_shown(value) for value in values]
        if len(shown_values) != self._responses:
            responses_text = counted(self._responses, "response")
            raise TypeError(f"log_extra got {counted(len(shown_values), 'value')} of {column} for {responses_text}")
        self._extra[str(column)] = shown_values

    def beside(self, results: list[Any]) -> list[Any]:
        """Return results with what was logged."""
        if not self._metrics and not self._extra:
            return results
        figures = {name: math.fsum(numbers) / len(numbers) for name, numbers in self._metrics.items()}
        logged: list[Any] = []
        for number, result in enumerate(results):
            extra = {column: values[number] for column, values in self._extra.items()}
            logged.append(_with_figures(result, figures, extra))
        return logged


def _shown(value: Any) -> Any:
    """Return a value as records have it: what JSON has no type for is shown as a text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    return str(value)[:_LONGEST]


def _with_figures(result: Any, figures: Mapping[str, float], extra: Mapping[str, Any]) -> Any:
    """Return a response's reward with figures beside it; errors and other objects unchanged."""
    try:
        reward = reward_from(result)
    except Exception:  # An object of users may raise anything; it is told where rewards are read.
        return result
    parts = reward.parts if isinstance(reward, PartedReward) else {}
    return PartedReward.joined(reward, {**parts, **figures}, extra)


async def _awaited(result: Any) -> Any:
    return await result


async def _together(calls: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)
