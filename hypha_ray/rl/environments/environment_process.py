"""Process of environments, which holds the episodes that it was asked for last."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hypha_ray.errors import ConfigError, HyphaError, reason_of
from hypha_ray.families import ENVIRONMENTS
from hypha_ray.plugins import create
from hypha_ray.rl.call_process import START_S, CallProcess, Code, Service, serve
from hypha_ray.rl.environments.environment import EnvironmentReply, opening_from, reply_from
from hypha_ray.rl.rewards.response import Response


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
        """Return what a method gave; what a coroutine returns in its place."""
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

    def _reply(self, play: Play) -> EnvironmentReply:
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
            from transformers.utils import get_json_schema  # It takes seconds to load.

            schemas.append(get_json_schema(tool))
    return tuple(schemas)


def _serve() -> None:
    """Answer requests from standard input."""
    serve(_load)


def _load(message: Any) -> Service:
    episodes = _Episodes(*message)
    return Service(episodes.tools, episodes.answer)
