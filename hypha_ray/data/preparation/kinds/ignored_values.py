"""Search for values in chats that leave no trace in the text that a chat template makes of them.

A value is ignored if the text is the same without it. Templates differ in the keys of messages that they know, and say
nothing of those that they don't: thoughts in ``reasoning_content``, or a speaker's ``name``, vanish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeAlias

from hypha_ray.data.preparation.sources.chats import Messages
from hypha_ray.data.provenance import Account, readable
from hypha_ray.errors import DataError

Render: TypeAlias = Callable[[Messages], str]
"""Text of messages, without a generation prompt."""
Ignored: TypeAlias = Counter[tuple[str, str]]
"""Number of ignored values by their noun and the reason for the account."""

_OTHERWISE_COUNTED: Final = frozenset({"role", "content", "weight", "train", "tool_calls"})
"""Keys of messages that aren't looked for: what a template needs, what it never sees, and calls."""
_OTHER = "another text"


def ignored_values(render: Render, messages: Messages, text: str) -> Ignored:
    """Values of messages without which a template makes the same text, and contents with the same text for others."""
    found: Ignored = Counter()
    for key in dict.fromkeys(key for message in messages for key in message if key not in _OTHERWISE_COUNTED):
        places = [place for place, message in enumerate(messages) if message.get(key) not in (None, "", [], {})]
        number = _ignored_at(places, partial(_without, messages, key), render, text)
        found["values", f"of {readable(key)!r} in messages, which the chat template ignores"] += number
    for role in dict.fromkeys(message["role"] for message in messages if message["role"] != "assistant"):
        places = [place for place, one in enumerate(messages) if one["role"] == role and _is_absent(one, text)]
        number = _ignored_at(places, partial(_with_other_content, messages), render, text)
        found["messages", f"of role {readable(role)!r}, whose content the chat template ignores"] += number
    return +found


def leave_out_ignored(account: Account, found: Iterable[Ignored]) -> None:
    """Put the ignored values of chats into an account."""
    for values in found:
        for (what, reason), number in values.items():
            account.leave_out(what, reason, number)


def _ignored_at(places: Sequence[int], changed: Callable[[Sequence[int]], Messages], render: Render, text: str) -> int:
    """Number of places whose value is ignored; messages are changed there, one by one unless all make no difference."""
    if not places or _same(render, changed(places), text):
        return len(places)
    return sum(_same(render, changed([place]), text) for place in places) if len(places) > 1 else 0


def _same(render: Render, messages: Messages, text: str) -> bool:
    """Whether a template makes the same text of other messages; one that refuses these knows the value."""
    try:
        return render(messages) == text
    except DataError:
        return False


def _is_absent(message: dict[str, object], text: str) -> bool:
    content = str(message["content"]).strip()
    return bool(content) and content not in text


def _without(messages: Messages, key: str, places: Sequence[int]) -> Messages:
    return [
        {name: value for name, value in message.items() if name != key or place not in places}
        for place, message in enumerate(messages)
    ]


def _with_other_content(messages: Messages, places: Sequence[int]) -> Messages:
    return [message | {"content": _OTHER} if place in places else message for place, message in enumerate(messages)]
