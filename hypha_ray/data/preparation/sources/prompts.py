"""Sources of prompts: columns of tables, generated problems, and tasks of the package reasoning-gym."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, TypeAlias

from hypha_ray.data.preparation.options import GENERATED, GYM, PROBLEMS, Options
from hypha_ray.data.preparation.sources.chats import said
from hypha_ray.data.preparation.sources.documents import read
from hypha_ray.data.preparation.sources.generated import gym_entries, problems
from hypha_ray.data.preparation.sources.tables import Column, Row, complete, no_table
from hypha_ray.data.provenance import Account
from hypha_ray.errors import DataError
from hypha_ray.rl.rewards.text import last_number

Messages: TypeAlias = list[dict[str, Any]]
"""A conversation in the form of chat templates: role, content, and any further keys of a message."""

_COUNT = 8192
"""Generated prompts, unless the user asks for another number."""
_MOST_DIGITS = 400
"""Most places before or behind the point of a number that is written without an exponent; a float has up to 324."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before it is encoded, and its record for rewards."""

    text: str | Messages
    data: dict[str, Any]


def prompts(options: Options, account: Account) -> Iterator[Prompt]:
    """The prompts of a source, up to the number asked for.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        ConfigError: the package for it isn't installed.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    name = options.source.partition(":")[2]
    limit = options.max_documents or (_COUNT if options.source.startswith(GENERATED) else None)
    found: Iterable[Prompt]
    if options.source.startswith(PROBLEMS):
        drawn = problems(name, options.seed)
        found = (Prompt(text, {"task": name, "answer": answer}) for text, answer in drawn)
    elif options.source.startswith(GYM):
        found = _gym(name, options.seed, limit or _COUNT)
    else:
        found = read(options, PromptReader(options), account)
    for prompt in itertools.islice(found, limit):
        account.documents += 1
        yield prompt


class PromptReader:
    """Reads prompts: rows of a table with a prompt, and an answer if there is a column for it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._prompt = Column(str(options.prompt_column), "--prompt-column")
        answer = options.answer_column
        self._answer = None if answer is None else Column(answer, "--answer-column")
        self._kept = [Column(name, "--keep-columns") for name in options.keep_columns]

    @property
    def columns(self) -> tuple[Column, ...]:
        """Those of prompt and answer, and others to keep."""
        return (self._prompt, *([self._answer] if self._answer else []), *self._kept)

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[Prompt]:
        """The prompts of rows; those without prompt or answer are put into the account.

        Raises:
            DataError: a row lacks a column, or has something in it that is of no use.

        """
        for where, row in complete(rows, self.columns, account):
            text = self._text(where, row[self._prompt.name])
            data = {"task": self._options.task or "exact"}
            if not text:
                account.leave_out("rows", "without a prompt")
                continue
            if self._answer:
                value = _without_float(row[self._answer.name])
                answer = self._answer_of(where, value)
                if not answer:
                    account.leave_out("rows", self._why_no_answer(value))
                    continue
                data["answer"] = answer
            yield Prompt(text, data | {column.name: _kept(where, column, row) for column in self._kept})

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[Prompt]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, f"column {self._prompt.name!r}")

    def _text(self, where: str, value: Any) -> str | Messages:
        if value is None or (isinstance(value, str) and not value.strip()):
            return ""
        if self._options.chat and (messages := _messages(said(value))):
            return messages
        if isinstance(value, str):
            return _clean(value)
        allowed = "text, or with --chat a list of messages with role and content"
        raise _useless(where, self._prompt, value, allowed)

    def _answer_of(self, where: str, value: Any) -> str | None:
        """The right answer in a column, as the task or the pattern has it; None without any."""
        assert self._answer is not None
        if value is None:
            return None
        if not isinstance(value, str | int | float) or not _is_json(value):
            raise _useless(where, self._answer, value, "text or a number")
        text = _clean(str(value).strip())
        if self._options.answer_pattern is not None:
            found = re.search(self._options.answer_pattern, text)
            return found and (found.group(1) if found.re.groups else found.group()).strip()
        if self._options.task == "gsm8k":
            return _number(text.rpartition("####")[2]) if "####" in text else None
        return _number(text) if self._options.task == "number" else text

    def _why_no_answer(self, value: Any) -> str:
        if value is None or not str(value).strip():
            return "without an answer"
        if self._options.answer_pattern is not None:
            return "answer without the pattern"
        return "no number behind #### in the answer" if self._options.task == "gsm8k" else "no number in the answer"


def _gym(name: str, seed: int, count: int) -> Iterator[Prompt]:
    """Prompts of a task of reasoning-gym, whose records have all that its own scoring takes."""
    for entry in gym_entries(name, seed, count):
        yield Prompt(_clean(entry["question"]), {"task": f"{GYM}{name}", **entry})


def _messages(value: Any) -> Messages:
    """A conversation, if a value is one; otherwise an empty list."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return []
    found = [{name: part for name, part in one.items() if part is not None} for one in value]
    return found if all(isinstance(one.get(key), str) for one in found for key in ("role", "content")) else []


def _kept(where: str, column: Column, row: Mapping[str, Any]) -> Any:
    """The value of a column that goes into the record as it is."""
    value = row[column.name]
    if not _is_json(value):
        raise _useless(where, column, value, "text, numbers, true, false, null, and lists and tables of them")
    return value


def _without_float(value: Any) -> Any:
    """A number as people write it. Tables have whole numbers as floats, and NaN, where a column lacks some of them."""
    if not isinstance(value, float | Decimal) or math.isinf(value):
        return value
    if math.isnan(value):
        return None
    return f"{Decimal(str(value)):f}".removesuffix(".0")


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(part) for key, part in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return all(map(_is_json, value)) if isinstance(value, list) else isinstance(value, str | int | None)


def _number(text: str) -> str | None:
    found = last_number(text)
    if found is None or abs(found.adjusted()) > _MOST_DIGITS:
        return None if found is None else str(found)
    return f"{found:f}"


def _clean(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and which aren't text."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _useless(where: str, column: Column, value: Any, allowed: str) -> DataError:
    what = f"{where}: column {column.name!r} is of no use"
    got = type(value).__name__
    return DataError("DATA031", what, got, allowed, f"name another with {column.flag}")
