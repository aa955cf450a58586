"""Contract of environments, their replies, and the process that plays the episodes of a user's environment.

reset(record)  ─► messages that open the conversation
step(response) ─► messages and a reward; no messages end the episode

The process holds the episodes that it was asked for last, and gives the replies on.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol, TypeAlias

from hypha_ray.errors import ConfigError, HyphaError, reason_of
from hypha_ray.families import ENVIRONMENTS
from hypha_ray.plugins import create
from hypha_ray.rl.call_process import START_S, CallProcess, Code, Service, serve
from hypha_ray.rl.rewards.response import Response
from hypha_ray.rl.rewards.signatures import reward_from

Message: TypeAlias = dict[str, Any]
"""Message in the form of chat templates: role and content, and any further keys, all of JSON."""
_LONGEST = 1_000_000
"""Largest number of characters of a reply's messages as JSON, which are made into tokens in the worker."""


class Environment(Protocol):
    """Environment of one episode. What it does follows from the record and the responses alone.

    Its methods may be coroutine functions. It may have `tools`, a list of functions or of JSON schemas for the chat
    template, and a method `close`.
    """

    def reset(self, record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Begin the episode.

        Args:
            record: record of the prompt in the dataset, and its text as `prompt`.

        Returns:
            Messages that open the conversation; None: the prompt of the dataset opens it.

        """
        ...

    def step(self, response: Response) -> tuple[Sequence[Mapping[str, Any]] | None, float | None]:
        """Take in a response of the policy.

        Args:
            response: response of this turn; it isn't ended if it was cut off, and is the last one then.

        Returns:
            Messages that go on, None if the episode is over; and the reward of this turn, None if it is absent.

        """
        ...


class EnvironmentReply(NamedTuple):
    """Reply of an environment."""

    messages: tuple[Message, ...] | None
    """Messages that go on; None: the episode is over, or begins with the prompt of the dataset."""
    reward: float
    """Reward of the turn; NaN if absent."""


def opening_from(result: Any) -> EnvironmentReply:
    """Return what `reset` gave.

    Raises:
        TypeError: it is something else than messages or None.
        ValueError: the messages are too long.

    """
    return EnvironmentReply(_messages(result), 0.0)


def reply_from(result: Any) -> EnvironmentReply:
    """Return what `step` gave.

    Raises:
        TypeError: it is something else than messages or None, and a number or None.
        ValueError: the messages are too long.

    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"step gave {_short(result)}, and no pair of messages and a reward")
    messages, reward = result
    if isinstance(reward, Mapping):
        raise TypeError("step gave a dictionary as the reward of a turn")
    return EnvironmentReply(_messages(messages), reward_from(reward))


def _messages(value: Any) -> tuple[Message, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise TypeError(f"it gave {_short(value)} in the place of messages; without any it gives None")
    messages: list[Message] = []
    characters = 0
    for message in value:
        if not isinstance(message, Mapping):
            raise TypeError(f"it gave {_short(message)} in the place of a message with role and content")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise TypeError(f"it gave a message without the texts role and content: {_short(dict(message))}")
        text = _as_json(message)
        characters += len(text)
        if characters > _LONGEST:
            raise ValueError(f"it gave messages of more than {_LONGEST} characters as JSON")
        messages.append(json.loads(text))
    return tuple(messages)


def _as_json(message: Mapping[str, Any]) -> str:
    """Return a message as JSON, which the worker can read without code of the environment."""
    try:
        return json.dumps(dict(message), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"it gave a message that JSON can't express ({error}): {_short(dict(message))}") from None


def _short(value: Any) -> str:
    return repr(value)[:80]


def total_of(rewards: Sequence[float]) -> float:
    """Return the sum of the rewards of all turns; NaN if one is absent."""
    return math.fsum(rewards)


class Play(NamedTuple):
    """Request for the reply to the last response of an episode; without a response, for the opening."""

    episode: int
    """Number of the episode."""
    record: Mapping[str, Any]
    """Record of its prompt."""
    responses: tuple[Response, ...]
    """All responses of the policy; those that the process doesn't know yet are taken in one after the other."""


class EnvironmentProcess(CallProcess):
    """Child process that plays episodes of an environment.

    Args:
        name: name of the environment.
        options: its own options; None: all defaults.
        start_s: longest time to load it.

    Raises:
        ConfigError: PLG001, PLG002, there is no such environment, or it can't be had in time; or its options are wrong.

    """

    def __init__(self, name: str, options: Mapping[str, Any] | None, start_s: float = START_S) -> None:
        code = Code("environments", name, ENVIRONMENTS.unloadable, f"{__name__}:_serve")
        super().__init__(code, (name, options), start_s)
        self.tools: tuple[dict[str, Any], ...] = self.greeting
        """JSON schemas of the tools that the environment offers."""

    def ask(self, plays: Sequence[Play]) -> None:
        """Send requests that are answered one after the other.

        For each `receive` gives an `EnvironmentReply`, the reason of a failure, or None if the process dies.
        """
        self.send(list(plays))

    def forget(self) -> None:
        """Ask it to end all episodes; `receive` gives an empty text then."""
        self.send(None)


class _Episodes:
    """Episodes in this process.

    Args:
        name: name of the environment.
        options: its own options.

    """

    def __init__(self, name: str, options: Mapping[str, Any] | None) -> None:
        self._name = name
        self._options = options
        self._environments: dict[int, Any] = {}
        self._taken_in: dict[int, int] = {}
        """Number of responses that each episode has taken in."""
        self._loop: asyncio.Runner | None = None
        """Loop of all coroutines; None before the first."""
        self.tools = self._tools()

    def _tools(self) -> tuple[dict[str, Any], ...]:
        """Return the schemas of the tools of a first environment.

        Raises:
            ConfigError: PLG002, it can't be made, or a tool has no schema.

        """
        try:
            return _schemas(getattr(create("environments", self._name, self._options), "tools", ()))
        except HyphaError:
            raise
        except (Exception, SystemExit) as error:  # A class of users may raise anything.
            problem = f"environment {self._name} can't be made, or one of its tools has no schema"
            fix = (
                "its constructor takes nothing, or its Options as the only argument; "
                "tools are functions with type hints and a docstring, or JSON schemas"
            )
            raise ConfigError(ENVIRONMENTS.unloadable, problem, reason_of(error), fix=fix) from None

    def _result(self, value: Any) -> Any:
        """Return a method's result; for a coroutine, the result of running it."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(_awaited(value))

    def answer(self, plays: Sequence[Play] | None, send: Callable[[object], None]) -> EnvironmentReply | str:
        """Send the replies to requests, or reasons why there are none, and return the last one."""
        if plays is None:
            return self._close()
        for play in plays[:-1]:
            send(self._reply_or_reason(play))
        return self._reply_or_reason(plays[-1])

    def _reply_or_reason(self, play: Play) -> EnvironmentReply | str:
        try:
            return self._reply(play)
        except HyphaError:
            raise
        except (Exception, SystemExit) as error:  # An environment of users may raise anything.
            return reason_of(error) or type(error).__name__

    def _reply(self, shared_play: Play) -> EnvironmentReply:
        play = deepcopy(shared_play)  # Episodes of a prompt share its record, which an environment may change.
        reply: EnvironmentReply | None = None
        number = play.episode
        if number not in self._environments:
            environment = create("environments", self._name, self._options)
            reply = opening_from(self._result(environment.reset(play.record)))
            self._environments[number] = environment
            self._taken_in[number] = 0
        environment = self._environments[number]
        for response in play.responses[self._taken_in[number] :]:
            reply = reply_from(self._result(environment.step(response)))
            self._taken_in[number] += 1
        assert reply is not None  # A request is for the opening, or has a further response.
        return reply

    def _close(self) -> str:
        environments = list(self._environments.values())
        self._environments.clear()
        self._taken_in.clear()
        for environment in environments:
            try:
                if hasattr(environment, "close"):
                    self._result(environment.close())
            except (Exception, SystemExit):
                pass
        return ""


async def _awaited(value: Any) -> Any:
    return await value


def _schemas(tools: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """Return the JSON schemas of tools, which may be functions with type hints and a docstring."""
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        if isinstance(tool, Mapping):
            schemas.append(dict(tool))
        else:
            from transformers.utils import get_json_schema  # This import takes seconds.

            schemas.append(get_json_schema(tool))
    return tuple(schemas)


def _serve() -> None:
    """Answer requests from standard input."""
    serve(_load)


def _load(message: Any) -> Service:
    episodes = _Episodes(*message)
    return Service(episodes.tools, episodes.answer)
