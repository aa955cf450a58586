"""Contract of environments, and their replies as a process gives them on.

reset(record)  ─► messages that open the conversation
step(response) ─► messages and a reward; no messages end the episode
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

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
            Messages that open the conversation; None: the prompt of the dataset does.

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
