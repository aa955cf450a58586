r"""Arguments of tool calls, which chat templates take as objects or as JSON text.

{"function": {"name": "weather", "arguments": {"city": "Paris"}}}          most templates, which write the JSON
{"function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"}}    services, and a few templates
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_CALLS = "tool_calls"
_FUNCTION = "function"
_ARGUMENTS = "arguments"


def count_calls(messages: list[dict[str, Any]]) -> int:
    """Count the calls in messages; a value of another form than a list of calls counts as one."""
    calls = (message.get(_CALLS) for message in messages)
    return sum(len(one) if isinstance(one, list) else 1 for one in calls if one)


def without_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without their calls."""
    return [{name: value for name, value in message.items() if name != _CALLS} for message in messages]


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have objects for arguments; other texts than JSON objects stay."""
    return _changed(message, _as_object)


def with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have JSON text for arguments."""
    return _changed(message, _as_text)


def _changed(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message with other arguments; those of other forms than lists of calls stay."""
    calls = message.get(_CALLS)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        return message
    return message | {_CALLS: [_call(call, change) for call in calls]}


def _call(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    inner = call.get(_FUNCTION)
    if isinstance(inner, Mapping):
        return {**call, _FUNCTION: _call(inner, change)}
    return {**call, _ARGUMENTS: change(call[_ARGUMENTS])} if _ARGUMENTS in call else {**call}


def _as_object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(arguments), dict):
                return found
    return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
