"""Sources of chats: tables whose rows are conversations, or prompts with completions.

    messages        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    conversations   [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], as in ShareGPT
    prompt          with completion: texts, or lists of messages
    instruction     with output, and an input if there is one, as in Alpaca

The first of these that a table has columns for is used, unless options name the columns. The columns ``system`` and
``tools`` are used as well. Arguments of tool calls are objects, or JSON text as services and a few templates have them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account, readable
from hypha_ray.data.sources.columns import (
    Column,
    Row,
    columns_fix,
    is_list_of,
    listed,
    no_table,
    objects_of,
    require_columns,
    without_surrogates,
)
from hypha_ray.data.sources.documents import counted_records, read
from hypha_ray.errors import DataError

Messages: TypeAlias = list[dict[str, Any]]
"""A conversation in the form of chat templates: role, content, and any further keys of a message."""

_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "prompter": "user",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
}
"""Role in chat templates, by its name in datasets."""
_OF_SYSTEM: Final = ("system", "developer")
_CONVERSATIONS = ("messages", "conversations")
_EXCHANGES = (("prompt", "completion"), ("instruction", "output"))
_KINDS = "messages; conversations; prompt and completion; instruction and output"
_SYSTEM = "system"
_TOOLS = "tools"
BESIDE_CHATS: Final = frozenset({_SYSTEM, _TOOLS})
"""Columns that are used beside those of a chat."""
_INSTRUCTION = "instruction"
_INPUT = "input"
_CALL = "function_call"
"""Role of messages whose content is the JSON of a call, or of a list of calls."""
_FLAGS: Final = ("weight", "train")
"""Keys that services and other trainers have for messages that are scored or not."""
_CALLS = "tool_calls"
_FUNCTION = "function"
_ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation before a template; `location` names its row, and `tools` describe functions to call."""

    location: str
    messages: Messages
    tools: list[Any] | None = None


def chats(options: PrepareOptions, account: Account) -> Iterator[Chat]:
    """The chats of a source, up to the number asked for.

    Raises:
        DataError: there is no such source, it is damaged, or a row isn't a chat.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    yield from counted_records(read(options, ChatReader(options), account), options.max_documents, account)


class ChatReader:
    """Reads chats: rows of a table with messages, or with a prompt and its completion."""

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._messages = Column(options.messages_column or "", "--messages-column")
        self._prompt = Column(options.prompt_column or "", "--prompt-column")
        self._completion = Column(options.completion_column or "", "--completion-column")

    @property
    def columns(self) -> tuple[Column, ...]:
        """Empty: the columns of a chat are recognised by the first row."""
        return ()

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[Chat]:
        """The chats of rows; those without text are put into the account.

        Raises:
            DataError: a row lacks a column, or isn't a chat.

        """
        columns: tuple[Column, ...] = ()
        for location, row in rows:
            columns = columns or self._chosen(location, row)
            account.drop(sorted(row.keys() - self._used(columns)))
            require_columns(location, row, columns)
            blank = blank_column(columns, row)
            if blank is not None:
                account.leave_out("rows", f"without text in {readable(blank)}")
            elif self._options.is_templated:
                messages = with_system(_conversation(location, columns, row), system_of(row), self._options)
                yield Chat(location, messages, tools_of(location, row))
            else:
                messages = [plain_message(location, column, row) for column in columns]
                messages[0]["content"] += input_text(columns[0], row)
                yield Chat(location, messages)

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[Chat]:
        """Refuse a plain text: it has no columns."""
        del file, is_only_file
        raise no_table(path, "chats")

    def _used(self, columns: tuple[Column, ...]) -> set[str]:
        """Names of the columns that are used, those beside the chat included."""
        return {column.name for column in columns} | columns_beside(columns[0], self._options)

    def _chosen(self, location: str, row: Mapping[str, Any]) -> tuple[Column, ...]:
        """The column of the messages, or the columns of prompt and completion."""
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
        fix = columns_fix(row) or "name columns with --messages-column, or with --prompt-column and --completion-column"
        raise DataError("DATA032", f"{location} has no chat", listed(row), _KINDS, fix)


def with_system(messages: Messages, of_row: str | None, options: PrepareOptions) -> Messages:
    """The messages behind the row's system message, or behind that of the options, unless they have one."""
    if messages and messages[0]["role"] in _OF_SYSTEM:
        return messages
    text = of_row or options.system
    if text is None:
        return messages
    return [{"role": "system", "content": text}, *messages]


def system_of(row: Mapping[str, Any]) -> str | None:
    """The system message of a row; None without any."""
    text = row.get(_SYSTEM)
    if isinstance(text, str) and text.strip():
        return without_surrogates(text)
    return None


def _conversation(location: str, columns: tuple[Column, ...], row: Mapping[str, Any]) -> Messages:
    if len(columns) == 1:
        return _messages(location, columns[0], row[columns[0].name])
    prompt_column, completion_column = columns
    prompt = given_before(exchange(location, prompt_column, row, "user"))
    completion = exchange(location, completion_column, row, "assistant")
    prompt, completion = split_answer(prompt, completion)
    prompt[-1]["content"] += input_text(prompt_column, row)
    return prompt + completion


def columns_beside(prompt: Column, options: PrepareOptions) -> frozenset[str]:
    """Names of columns that are used beside a prompt if there are any: for a template, and of an instruction."""
    names = frozenset[str]()
    if options.is_templated:
        names |= BESIDE_CHATS
    if prompt.name == _INSTRUCTION:
        names |= {_INPUT}
    return names


def input_text(prompt: Column, row: Mapping[str, Any]) -> str:
    """The input of an instruction, as it follows that; empty without one."""
    text = row.get(_INPUT) if prompt.name == _INSTRUCTION else None
    if not isinstance(text, str) or not text.strip():
        return ""
    return f"\n\n{without_surrogates(text)}"


def split_answer(prompt: Messages, answer: Messages) -> tuple[Messages, Messages]:
    """A prompt and the messages behind it, for answers that are whole conversations and so repeat the prompt.

    An answer may have system messages before those of the prompt, which are then a part of it.
    """
    begin = 0
    while begin < len(answer) and answer[begin]["role"] in _OF_SYSTEM:
        begin += 1
    if prompt and prompt[0]["role"] in _OF_SYSTEM:
        begin = 0
    end = begin + len(prompt)
    if len(answer) > end and list(map(_words, answer[begin:end])) == list(map(_words, prompt)):
        return answer[:begin] + prompt, answer[end:]
    return prompt, answer


def _words(message: Mapping[str, Any]) -> tuple[str, str]:
    """Role and content of a message, without white space around it."""
    return message["role"], message["content"].strip()


def given_before(prompt: Messages) -> Messages:
    """The messages of a prompt, whose answers aren't scored: only the completion is to be learned."""
    messages = []
    for message in prompt:
        messages.append(message | {"weight": 0} if message["role"] == "assistant" else message)
    return messages


def exchange(location: str, column: Column, row: Mapping[str, Any], role: str) -> Messages:
    """The messages of a prompt or a completion, which may be a single one; a text is a message of the role."""
    value = messages_of(row[column.name])
    if isinstance(value, str):
        return [{"role": role, "content": without_surrogates(value)}]
    if isinstance(value, Mapping) and _is_message(value):
        value = [value]
    return _messages(location, column, value)


def plain_message(location: str, column: Column, row: Mapping[str, Any]) -> dict[str, Any]:
    """The text in a column as a message, whose role no template will see."""
    value = row[column.name]
    if not isinstance(value, str):
        raise _useless(location, column, type(value).__name__, "text, or with --chat a list of messages")
    role = "user" if column.flag == "--prompt-column" else "assistant"
    return {"role": role, "content": without_surrogates(value)}


def messages_of(value: Any) -> Any:
    """The messages that a CSV file has as JSON; any other value as it is, also the JSON of other lists."""
    objects = objects_of(value)
    return objects if isinstance(objects, list) and has_messages(objects) else value


def has_messages(value: Any) -> bool:
    """Whether a value is a message or a list of them, which CSV files have as JSON."""
    objects = objects_of(value)
    return _is_message(value) or (isinstance(objects, list) and bool(objects) and all(map(_is_message, objects)))


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys().isdisjoint(("content", "value", "tool_calls")):
        return False
    role = value.get("role", value.get("from"))
    return isinstance(role, str) and role.lower() in _ROLES


def _messages(location: str, column: Column, value: Any) -> Messages:
    """The messages in a column."""
    objects = objects_of(value)
    if not is_list_of(objects, Mapping):
        raise _useless(location, column, type(objects).__name__, "a list of messages")
    return [_message(location, column, message) for message in objects]


def _message(location: str, column: Column, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form of chat templates."""
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.pop("role", fields.pop("from", None))
    content = fields.pop("content", fields.pop("value", None))
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise _useless(location, column, f"role {role!r}", ", ".join(_ROLES))
    if role == _CALL and isinstance(content, str):
        fields[_CALLS] = _calls_in(location, column, content)
        content = ""
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        content = "".join(part["text"] for part in content)
    if content is None and _CALLS in fields:
        content = ""
    if not isinstance(content, str):
        raise _no_text(location, column, content)
    for flag in _FLAGS:
        value = fields.get(flag, 1)
        if value not in (0, 1):
            raise _useless(location, column, f"{flag} {value!r}", "0 or 1")
        if not value:
            fields["weight"] = 0
    return with_objects({"role": _ROLES[role.lower()], "content": without_surrogates(content), **fields})


def _calls_in(location: str, column: Column, content: str) -> list[dict[str, Any]]:
    """Calls of tools in the content of a message of their role, in the form of chat templates."""
    calls: Any = None
    with suppress(ValueError, RecursionError):
        calls = json.loads(content)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not is_list_of(calls, Mapping) or not all(isinstance(call.get("name"), str) for call in calls):
        raise _useless(location, column, f"a message of the role {_CALL} with {content[:80]!r}", "JSON of a call")
    return [{"type": _FUNCTION, _FUNCTION: dict(call)} for call in calls]


def _no_text(location: str, column: Column, content: Any) -> DataError:
    if is_list_of(content, Mapping):
        kinds = sorted({str(part.get("type")) for part in content if not _is_text_part(part)})
        got = f"content with parts of type {', '.join(kinds)}"
        return _useless(location, column, got, "text; images and other media of chats aren't read")
    return _useless(location, column, f"content of type {type(content).__name__}", "text")


def _is_text_part(part: Any) -> bool:
    """Whether a part of a message is a text, as of services whose messages may have images, too."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def tools_of(location: str, row: Mapping[str, Any]) -> list[Any] | None:
    """The descriptions of tools beside a chat; None without any."""
    value = row.get(_TOOLS)
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not value:
        return None
    schemas = objects_of(value)
    if not is_list_of(schemas, dict):
        column = Column(_TOOLS, "--messages-column")
        raise _useless(location, column, type(schemas).__name__, "a list of JSON schemas")
    return schemas


def blank_column(columns: Iterable[Column], row: Mapping[str, Any]) -> str | None:
    """Name of the first column whose value in the row is blank; None if all have one."""
    for column in columns:
        if _is_blank(row[column.name]):
            return column.name
    return None


def _is_blank(value: Any) -> bool:
    """Whether a value has neither text nor messages."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or value == []


def _useless(location: str, column: Column, got: str, allowed: str) -> DataError:
    problem = f"{location}: column {readable(column.name)!r} has no chat"
    return DataError("DATA031", problem, got, allowed, f"mend it, or name another column with {column.flag}")


def count_calls(messages: list[dict[str, Any]]) -> int:
    """Count the calls in messages; a value of another form than a list of calls counts as one."""
    count = 0
    for message in messages:
        calls = message.get(_CALLS)
        if calls:
            count += len(calls) if isinstance(calls, list) else 1
    return count


def without_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without their calls."""
    bare_messages = []
    for message in messages:
        bare_messages.append({name: value for name, value in message.items() if name != _CALLS})
    return bare_messages


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have objects for arguments; other texts than JSON objects stay."""
    return _changed(message, _as_object)


def with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have JSON text for arguments."""
    return _changed(message, _as_text)


def _changed(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message whose calls have changed arguments; calls that aren't in a list stay as they are."""
    calls = message.get(_CALLS)
    if not is_list_of(calls, Mapping):
        return message
    return message | {_CALLS: [_call(call, change) for call in calls]}


def _call(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    inner = call.get(_FUNCTION)
    if isinstance(inner, Mapping):
        return {**call, _FUNCTION: _call(inner, change)}
    if _ARGUMENTS in call:
        return {**call, _ARGUMENTS: change(call[_ARGUMENTS])}
    return {**call}


def _as_object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            if isinstance(parsed, dict):
                return parsed
    return arguments


def _as_text(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)
