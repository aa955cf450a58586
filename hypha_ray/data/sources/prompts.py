"""Sources of prompts: columns of tables, generated problems, and tasks of the package reasoning-gym.

Problems of digits are for a small machine:

    copy3      481=      481        sums          7+5=      12
    reverse3   481=      184        sums2         38+4=     42
    sort3      481=      148        remainders    7+5=      2
    max3       481=      8          remainders2   38+4=     2

The number behind a name is the number of digits, 1 to 9; terms of `sums` and `remainders` may have fewer. Remainders
are sums modulo ten.

Entries of reasoning-gym are drawn in a process of their own, whose hashes of texts are fixed. Some tasks draw from sets
of texts, whose order follows these hashes: by default another one in each process.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import numpy as np

from hypha_ray.data.options import GENERATED, GYM, PROBLEMS, PrepareOptions
from hypha_ray.data.provenance import Account
from hypha_ray.data.sources.chats import (
    columns_beside,
    exchange,
    has_messages,
    input_text,
    messages_of,
    system_of,
    tools_of,
)
from hypha_ray.data.sources.columns import (
    Column,
    Row,
    no_table,
    require_columns,
    useless_value,
    without_surrogates,
)
from hypha_ray.data.sources.documents import counted_records, read
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.rl.rewards.registered import last_number
from hypha_ray.rl.rewards.response import from_json, to_json

ALPHABET: Final = "0123456789+-*= "
"""Characters of all problems, so that models of one vocabulary can be trained on any of them."""

Problem: TypeAlias = tuple[str, str]
"""Prompt and answer."""

_OF_DIGITS: Final[dict[str, Callable[[str], str]]] = {
    "copy": lambda digits: digits,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "max": max,
}
_OF_TWO_NUMBERS: Final[dict[str, Callable[[int, int], int]]] = {
    "sums": lambda a, b: a + b,
    "remainders": lambda a, b: (a + b) % 10,
}
_KEYS = ("answer", "question", "metadata")
"""Parts of an entry that its own scoring takes."""
_SEEDS = 1 << 31
"""Number of seeds of reasoning-gym; some of its tasks take none above 2^32, with the number of the entry added."""
_SPREAD = 2_654_435_761
"""Factor of seeds, 2^32 by the golden ratio: of the first 101 seeds, any two begin 6.6 million entries apart."""
_NAME = re.compile(r"([a-z]+)([1-9]?)")
Messages: TypeAlias = list[dict[str, Any]]
"""A conversation in the form of chat templates: role, content, and any further keys of a message."""

_COUNT = 8192
"""Number of generated prompts by default."""
_MOST_DIGITS = 400
"""Most places before or behind the point of a number that is written without an exponent; a float has up to 324."""


def problems(name: str, seed: int) -> Iterator[Problem]:
    """Problems without end; the same seed gives the same ones. Draws are independent, so small tasks repeat problems.

    Args:
        name: kind and number of digits, such as ``sort2``; without a number 2 digits, and 1 of sums and remainders.
        seed: seed of the draws.

    Raises:
        DataError: there are no such problems.

    """
    match = _NAME.fullmatch(name)
    kind, digits = match.groups() if match else (name, "")
    generator = np.random.default_rng(seed)
    if kind in _OF_DIGITS:
        return _of_digits(_OF_DIGITS[kind], int(digits or 2), generator)
    if kind in _OF_TWO_NUMBERS:
        return _of_two_numbers(_OF_TWO_NUMBERS[kind], int(digits or 1), generator)
    kinds = [*_OF_DIGITS, *_OF_TWO_NUMBERS]
    similar = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.5)
    allowed = f"{', '.join(kinds)}, with the number of digits behind it, 1 to 9"
    fix = f"did you mean {similar[0]!r}?" if similar else "such as problems:sort2"
    raise DataError("DATA030", f"there are no problems {name!r}", name, allowed, fix)


def _of_digits(answer: Callable[[str], str], length: int, generator: np.random.Generator) -> Iterator[Problem]:
    while True:
        digits = "".join(map(str, generator.integers(10, size=length)))
        yield f"{digits}=", answer(digits)


def _of_two_numbers(
    answer: Callable[[int, int], int], length: int, generator: np.random.Generator
) -> Iterator[Problem]:
    while True:
        a, b = map(int, generator.integers(10**length, size=2))
        yield f"{a}+{b}=", str(answer(a, b))


def gym_entries(name: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Draw entries of a task: the same ones for a seed, in whatever process.

    The package draws entry i from ``seed + i``, so neighbouring seeds would share their entries. Seeds are spread here.

    Raises:
        ConfigError: PREP008, the package isn't installed.
        DataError: DATA030, it has no such task, or can't draw from it.

    """
    _require(name)
    first_seed = seed * _SPREAD % _SEEDS
    command = [sys.executable, "-P", "-c", f"from {__name__} import _draw; _draw()", name, str(first_seed), str(count)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=printed) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield from_json(line)
        printed.seek(0)
        _, _, last_line = printed.read().decode(errors="replace").strip().rpartition("\n")
    if process.returncode:
        problem = f"reasoning-gym can't draw from its task {name!r}"
        raise DataError("DATA030", problem, last_line, fix="name another task")


def _require(name: str) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        got = " ".join(str(error).split())
        fix = "pip install 'hypha_ray[rl]'"
        raise ConfigError("PREP008", f"--source {GYM}{name} needs the package reasoning-gym", got, fix=fix) from None
    if name not in DATASETS:
        similar = difflib.get_close_matches(name, DATASETS, n=1)
        fix = f"did you mean {similar[0]!r}?" if similar else "name one of them"
        raise DataError("DATA030", f"reasoning-gym has no task {name!r}", name, ", ".join(sorted(DATASETS)), fix)


def _draw() -> None:
    """Write the entries that the command line asks for to standard output, a line each."""
    import reasoning_gym

    name = sys.argv[1]
    seed = int(sys.argv[2])
    count = int(sys.argv[3])
    with os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass") as lines:
        os.dup2(2, 1)  # The package may print.
        for entry in reasoning_gym.create_dataset(name, size=count, seed=seed):
            record = {key: entry[key] for key in _KEYS if entry[key] is not None}
            lines.write(to_json(record) + "\n")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before it is encoded, and its record for rewards."""

    text: str | Messages
    data: dict[str, Any]
    system: str | None = None
    """System message of the row; None without any."""
    tools: list[Any] | None = None
    """Descriptions of tools for the chat template; None without any."""


def prompts(options: PrepareOptions, account: Account) -> Iterator[Prompt]:
    """The prompts of a source, up to the number asked for.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        ConfigError: the package for it isn't installed.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    name = options.source.partition(":")[2]
    limit = options.max_documents
    if limit is None and options.source.startswith(GENERATED):
        limit = _COUNT
    source: Iterable[Prompt]
    if options.source.startswith(PROBLEMS):
        source = _problems(name, options.seed)
    elif options.source.startswith(GYM):
        source = _gym(name, options.seed, limit or _COUNT)
    else:
        source = read(options, PromptReader(options), account)
    yield from counted_records(source, limit, account)


class PromptReader:
    """Reads prompts: rows of a table with a prompt, and an answer if there is a column for it."""

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._prompt = Column(str(options.prompt_column), "--prompt-column")
        answer = options.answer_column
        self._answer = None if answer is None else Column(answer, "--answer-column")
        self._copied = [Column(name, "--keep-columns") for name in options.keep_columns]
        self._needed = [self._prompt, *self._copied]
        if self._answer is not None:
            self._needed.append(self._answer)
        self._beside = columns_beside(self._prompt, options)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of prompt and answer, and those that are copied; empty if others may be used beside them."""
        if self._beside:
            return ()
        return tuple(self._needed)

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[Prompt]:
        """The prompts of rows; those without prompt or answer are put into the account.

        Raises:
            DataError: a row lacks a column, or has something in it that is of no use.

        """
        used = self._beside.union(column.name for column in self._needed)
        for location, row in rows:
            account.drop(sorted(row.keys() - used))
            require_columns(location, row, self._needed)
            text = self._text(location, row)
            record = {"task": self._options.task or "exact"}
            if not text:
                account.leave_out("rows", "without a prompt")
                continue
            if self._answer:
                value = _without_float(row[self._answer.name])
                answer = self._answer_of(location, value)
                if not answer:
                    account.leave_out("rows", self._why_no_answer(value))
                    continue
                record["answer"] = answer
            for column in self._copied:
                record[column.name] = _copied(location, column, row)
            yield self._prompted(location, row, text, record)

    def _prompted(self, location: str, row: Mapping[str, Any], text: str | Messages, record: dict[str, Any]) -> Prompt:
        """A prompt with what other columns have for it."""
        further_text = input_text(self._prompt, row)
        if isinstance(text, str):
            text += further_text
        else:
            text[-1]["content"] += further_text
        if not self._options.chat:
            return Prompt(text, record)
        return Prompt(text, record, system_of(row), tools_of(location, row))

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[Prompt]:
        """Refuse a plain text: it has no columns."""
        del file, is_only_file
        raise no_table(path, f"column {self._prompt.name!r}")

    def _text(self, location: str, row: Mapping[str, Any]) -> str | Messages:
        value = row[self._prompt.name]
        if self._options.chat and has_messages(value):
            return exchange(location, self._prompt, row, "user")
        if value is None or (isinstance(value, str) and not value.strip()):
            return ""
        messages = _messages(messages_of(value)) if self._options.chat else []
        if messages:
            return messages
        if isinstance(value, str):
            return without_surrogates(value)
        allowed = "text, or with --chat a list of messages with role and content"
        raise useless_value(location, self._prompt, type(value).__name__, allowed)

    def _answer_of(self, location: str, value: Any) -> str | None:
        """The right answer in a column, as the task or the pattern has it; None without any."""
        assert self._answer is not None
        if value is None:
            return None
        if not isinstance(value, str | int | float) or not _is_json(value):
            raise useless_value(location, self._answer, type(value).__name__, "text or a number")
        text = without_surrogates(str(value).strip())
        if self._options.answer_pattern is not None:
            match = re.search(self._options.answer_pattern, text)
            if match is None:
                return None
            answer = match.group(1) if match.re.groups else match.group()
            return answer.strip()
        if self._options.task == "gsm8k":
            _, mark, answer = text.rpartition("####")
            return _number(answer) if mark else None
        if self._options.task == "number":
            return _number(text)
        return text

    def _why_no_answer(self, value: Any) -> str:
        if value is None or not str(value).strip():
            return "without an answer"
        if self._options.answer_pattern is not None:
            return "answer without the pattern"
        if self._options.task == "gsm8k":
            return "no number behind #### in the answer"
        return "no number in the answer"


def _problems(name: str, seed: int) -> Iterator[Prompt]:
    """Generated problems as prompts, without end."""
    for text, answer in problems(name, seed):
        yield Prompt(text, {"task": name, "answer": answer})


def _gym(name: str, seed: int, count: int) -> Iterator[Prompt]:
    """Prompts of a task of reasoning-gym, whose records have all fields that its own scoring takes."""
    for entry in gym_entries(name, seed, count):
        text = without_surrogates(entry["question"])
        yield Prompt(text, {"task": f"{GYM}{name}", **entry})


def _messages(value: Any) -> Messages:
    """A conversation, if a value is one; otherwise an empty list."""
    if not isinstance(value, list):
        return []
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            return []
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return []
        messages.append({name: part for name, part in message.items() if part is not None})
    return messages


def _copied(location: str, column: Column, row: Mapping[str, Any]) -> Any:
    """The value of a column that goes into the record as it is."""
    value = row[column.name]
    if not _is_json(value):
        allowed = "text, numbers, true, false, null, and lists and tables of them"
        raise useless_value(location, column, type(value).__name__, allowed)
    return value


def _without_float(value: Any) -> Any:
    """A number as people write it. Tables have whole numbers as floats, and NaN for those that a column lacks."""
    if not isinstance(value, float | Decimal) or math.isinf(value):
        return value
    if math.isnan(value):
        return None
    number = Decimal(str(value))
    return f"{number:f}".removesuffix(".0")


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int | None)


def _number(text: str) -> str | None:
    """The last number in a text; None without one."""
    number = last_number(text)
    if number is None:
        return None
    if abs(number.adjusted()) > _MOST_DIGITS:
        return str(number)
    return f"{number:f}"
