"""Sources of chats: tables whose rows are conversations, or prompts with completions.

    messages        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    conversations   [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], as in ShareGPT
    prompt          with completion: texts, or lists of messages
    instruction     with output, and an input if there is one, as in Alpaca

The first of these that a table has columns for is used, unless options name the columns. The columns ``system`` and
``tools`` are used as well. Arguments of tool calls are objects, or JSON text as services and a few templates have them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.sources.documents import read
from hypha_ray.data.preparation.sources.tables import Column, Row, no_column, no_table, objects_of
from hypha_ray.data.provenance import Account, readable
from hypha_ray.errors import DataError

Messages: TypeAlias = list[dict[str, Any]]
"""A conversation in the form of chat templates: role, content, and any further keys of a message."""

_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function": "tool",
} | {role: role for role in ("user", "assistant", "system", "developer", "tool")}
"""Role in chat templates, by its name in datasets."""
_CONVERSATIONS = ("messages", "conversations")
_EXCHANGES = (("prompt", "completion"), ("instruction", "output"))
_KINDS = "messages; conversations; prompt and completion; instruction and output"
_SYSTEM = "system"
_TOOLS = "tools"
_EXTRA = {_SYSTEM, _TOOLS}
_INSTRUCTION = "instruction"
_INPUT = "input"
_FLAGS: Final = ("weight", "train")
"""Keys of a message that is scored or not: those of services, and of other trainers."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation before a template; `where` is the place of its row, and `tools` describe functions to call."""

    where: str
    messages: Messages
    tools: list[Any] | None = None


def chats(options: Options, account: Account) -> Iterator[Chat]:
    """The chats of a source, up to the number asked for.

    Raises:
        DataError: there is no such source, it is damaged, or a row isn't a chat.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    for chat in itertools.islice(read(options, ChatReader(options), account), options.max_documents):
        account.documents += 1
        yield chat


class ChatReader:
    """Reads chats: rows of a table with messages, or with a prompt and its completion."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._messages = Column(options.messages_column or "", "--messages-column")
        self._prompt = Column(options.prompt_column or "", "--prompt-column")
        self._completion = Column(options.completion_column or "", "--completion-column")

    @property
    def columns(self) -> tuple[Column, ...]:
        """None in particular: those of a chat are recognised by the first row."""
        return ()

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[Chat]:
        """The chats of rows; those without text are put into the account.

        Raises:
            DataError: a row lacks a column, or isn't a chat.

        """
        columns: tuple[Column, ...] = ()
        for where, row in rows:
            columns = columns or self._chosen(where, row)
            used = {column.name for column in columns} | (_EXTRA if self._options.is_templated else set())
            account.drop(sorted(row.keys() - used - ({_INPUT} if columns[0].name == _INSTRUCTION else set())))
            if missing := [column for column in columns if column.name not in row]:
                raise no_column(where, missing[0], row)
            if empty := [column.name for column in columns if _is_blank(row[column.name])]:
                account.leave_out("rows", f"without text in {readable(empty[0])}")
                continue
            if self._options.is_templated:
                yield Chat(where, self._with_system(_conversation(where, columns, row), row), _tools(where, row))
            else:
                yield Chat(where, [_plain(where, column, row) for column in columns])

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[Chat]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, "chats")

    def _chosen(self, where: str, row: Mapping[str, Any]) -> tuple[Column, ...]:
        """The column of the messages, or those of prompt and completion."""
        if self._options.messages_column is not None:
            return (self._messages,)
        if self._options.completion_column is not None:
            return self._prompt, self._completion
        for name in _CONVERSATIONS:
            if name in row:
                return (Column(name, self._messages.flag),)
        for prompt, completion in _EXCHANGES:
            if prompt in row and completion in row:
                return Column(prompt, self._prompt.flag), Column(completion, self._completion.flag)
        fix = "name columns with --messages-column, or with --prompt-column and --completion-column"
        raise DataError("DATA032", f"{where} has no chat", ", ".join(sorted(map(readable, row))), _KINDS, fix)

    def _with_system(self, messages: Messages, row: Mapping[str, Any]) -> Messages:
        """The messages behind the row's system message, or behind that of the options, unless they have one."""
        if messages and messages[0]["role"] in ("system", "developer"):
            return messages
        text = row.get(_SYSTEM)
        text = _clean(text) if isinstance(text, str) and text.strip() else self._options.system
        return messages if text is None else [{"role": "system", "content": text}, *messages]


def _conversation(where: str, columns: tuple[Column, ...], row: Mapping[str, Any]) -> Messages:
    if len(columns) == 1:
        return _messages(where, columns[0], row[columns[0].name])
    asked, answered = (
        [{"role": role, "content": _clean(value)}] if isinstance(value, str) else _messages(where, column, value)
        for role, column, value in zip(
            ("user", "assistant"), columns, (said(row[column.name]) for column in columns), strict=True
        )
    )
    # Answers in a prompt were given before: only the completion is to be learned.
    asked = [message | {"weight": 0} if message["role"] == "assistant" else message for message in asked]
    context = row.get(_INPUT) if columns[0].name == _INSTRUCTION else None
    if isinstance(context, str) and context.strip():
        asked[-1]["content"] += f"\n\n{_clean(context)}"
    return asked + answered


def _plain(where: str, column: Column, row: Mapping[str, Any]) -> dict[str, Any]:
    """The text in a column as a message, whose role no template will see."""
    value = row[column.name]
    if not isinstance(value, str):
        raise _useless(where, column, type(value).__name__, "text, or with --chat a list of messages")
    return {"role": "user" if column.flag == "--prompt-column" else "assistant", "content": _clean(value)}


def said(value: Any) -> Any:
    """The messages that a CSV file has as JSON; any other value as it is, also the JSON of other lists."""
    found = objects_of(value)
    return found if isinstance(found, list) and found and all(map(_is_message, found)) else value


def _is_message(one: Any) -> bool:
    if not isinstance(one, Mapping) or one.keys().isdisjoint(("content", "value", "tool_calls")):
        return False
    role = one.get("role", one.get("from"))
    return isinstance(role, str) and role in _ROLES


def _messages(where: str, column: Column, value: Any) -> Messages:
    """The messages in a column."""
    value = objects_of(value)
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        allowed = "a list of messages"
        raise _useless(where, column, type(value).__name__, allowed)
    return [_message(where, column, one) for one in value]


def _message(where: str, column: Column, given: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in given.items() if value is not None}
    role = found.pop("role", found.pop("from", None))
    content = found.pop("content", found.pop("value", None))
    if not isinstance(role, str) or role not in _ROLES:
        raise _useless(where, column, f"role {role!r}", ", ".join(_ROLES))
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and "tool_calls" in found):
        raise _useless(where, column, f"content of type {type(content).__name__}", "text")
    for flag in _FLAGS:
        if (value := found.get(flag, 1)) not in (0, 1):
            raise _useless(where, column, f"{flag} {value!r}", "0 or 1")
        if not value:
            found["weight"] = 0
    return with_objects({"role": _ROLES[role], "content": _clean(content or ""), **found})


def _is_text_part(part: Any) -> bool:
    """Whether a part of a message is a text, as of services whose messages may have images, too."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _tools(where: str, row: Mapping[str, Any]) -> list[Any] | None:
    value = row.get(_TOOLS)
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not value:
        return None
    value = objects_of(value)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise _useless(where, Column(_TOOLS, "--messages-column"), type(value).__name__, "a list of JSON schemas")
    return value


def _is_blank(value: Any) -> bool:
    return not value.strip() if isinstance(value, str) else value is None or value == []


def _clean(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and which aren't text."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _useless(where: str, column: Column, got: str, allowed: str) -> DataError:
    problem = f"{where}: column {readable(column.name)!r} has no chat"
    return DataError("DATA031", problem, got, allowed, f"mend it, or name another column with {column.flag}")


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
