"""Sources of texts with labels, and of preferences: answers of which one was chosen, or one answer with a judgement.

A labelled text is a text or a list of words. Rows of preferences have these columns, named as in TRL, unless options
name others:

    prompt, chosen, rejected      texts, or lists of messages
    chosen, rejected              the same; the prompt is what both begin with
    margin                        beside them: a number by which the chosen answer is better
    prompt, completion, label     a text or messages, and whether the answer is desirable
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeAlias

from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account, readable
from hypha_ray.data.sources.chats import (
    Chat,
    Messages,
    blank_column,
    columns_beside,
    exchange,
    given_before,
    input_text,
    messages_of,
    plain_message,
    split_answer,
    system_of,
    tools_of,
    with_system,
)
from hypha_ray.data.sources.columns import (
    TEXT_FLAG,
    Column,
    Row,
    complete,
    is_list_of,
    list_of,
    no_table,
    require_columns,
    useless_value,
    without_surrogates,
)
from hypha_ray.data.sources.documents import counted_records, read
from hypha_ray.errors import DataError

_LARGEST = 3.4e38
_MARKS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
Label: TypeAlias = str | list[str]
"""Name of a class, or names of several."""
_KINDS = "chosen and rejected; prompt, completion and label"
_LARGEST_MARGIN: Final = 1e38
"""Margins are stored in 32 bits, which hold no larger numbers."""
_JUDGEMENTS: Final = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Judgements by their texts in CSV files; tables with gaps have whole numbers as floats."""


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text, or a list of words, and its label, labels, or number to predict; `location` names its row."""

    location: str
    text: str | list[str]
    label: Label | float
    second: str | None = None
    """Text that belongs to the first one; None without."""


def labelled_texts(options: PrepareOptions, classes: list[str], account: Account) -> Iterator[LabelledText]:
    """The labelled texts of a source, up to the number asked for; `classes` receives names that the source has.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    texts = read(options, LabelledTextReader(options, classes), account)
    yield from counted_records(texts, options.max_documents, account)


class LabelledTextReader:
    """Reads rows of a table with a text and its label."""

    def __init__(self, options: PrepareOptions, classes: list[str]) -> None:
        self._text = Column(options.text_column, TEXT_FLAG)
        self._second: tuple[Column, ...] = ()
        if options.second_column is not None:
            self._second = (Column(options.second_column, "--second-column"),)
        self._regression = options.regression
        self._has_marks = bool(options.label_columns)
        if self._has_marks:
            self._labels = tuple(Column(name, "--label-columns") for name in options.label_columns)
            classes += options.label_columns
        else:
            class_names = None if options.regression else classes
            self._labels = (Column(str(options.label_column), "--label-column", class_names),)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of texts and labels."""
        return self._text, *self._second, *self._labels

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[LabelledText]:
        """The texts of rows; those without text or label are put into the account.

        Raises:
            DataError: a row lacks a column, or has something in it that is of no use.

        """
        for location, row in complete(rows, self.columns, account):
            text = _words_or_text(row[self._text.name])
            labels = [list_of(row[column.name]) for column in self._labels]
            second_texts = [row[column.name] for column in self._second]
            if text is None or text == [] or any(map(_is_blank, (text, *second_texts))):
                account.leave_out("rows", "without text")
            elif None in second_texts:
                account.leave_out("rows", "without a second text")
            elif any(map(no_label, labels)):
                account.leave_out("rows", "without a label")
            else:
                second = self._second_text(location, *second_texts) if second_texts else None
                yield LabelledText(location, self._words(location, text), self._label(location, labels), second)

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[LabelledText]:
        """Refuse a plain text: it has no columns."""
        del file, is_only_file
        raise no_table(path, f"column {self._labels[0].name!r}")

    def _label(self, location: str, values: Sequence[Any]) -> Label | float:
        """Name of a class, names of several, or a number to predict."""
        if self._regression:
            return _number(location, self._labels[0], values[0])
        if self._has_marks:
            marks = map(partial(_is_marked, location), self._labels, values)
            return [column.name for column, marked in zip(self._labels, marks, strict=True) if marked]
        return label_of(location, self._labels[0], values[0])

    def _second_text(self, location: str, value: Any) -> str:
        if not isinstance(value, str):
            raise useless_value(location, self._second[0], type(value).__name__, "text")
        return without_surrogates(value)

    def _words(self, location: str, value: Any) -> str | list[str]:
        if isinstance(value, str):
            return without_surrogates(value)
        if is_list_of(value, str):
            return [without_surrogates(word) for word in value]
        raise useless_value(location, self._text, type(value).__name__, "text, or a list of words")


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def no_label(value: Any) -> bool:
    """Whether a row has no label: nothing, white space, or NaN, which tables of pandas have for a missing one."""
    if isinstance(value, float | Decimal):
        return math.isnan(value)
    return value is None or _is_blank(value)


def label_of(location: str, column: Column, value: Any) -> Label:
    """The name of a class, or names of several; a whole number is the name of its class.

    Raises:
        DataError: the value is anything else, or a list with an empty text.

    """
    values = value if isinstance(value, list) else [value]
    allowed = "text or a whole number, or a list of them"
    labels = list(map(_without_fraction, values))
    for label in labels:
        if not isinstance(label, str | int):
            raise useless_value(location, column, type(label).__name__, allowed)
    names = [readable(str(label).strip()) for label in labels]
    if not all(names):
        raise useless_value(location, column, "an empty label", allowed)
    return names if isinstance(value, list) else names[0]


def _without_fraction(value: Any) -> Any:
    """A label; a float or a decimal such as 1.0 becomes a whole number."""
    if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _number(location: str, column: Column, value: Any) -> float:
    """A finite number that float32 can hold."""
    with suppress(ValueError, TypeError, OverflowError):
        number = math.nan if isinstance(value, bool) else float(value)
        if abs(number) <= _LARGEST:
            return number
    raise useless_value(location, column, readable(str(value)), "a finite number")


def _is_marked(location: str, column: Column, value: Any) -> bool:
    """Whether a row is of the class of a column."""
    mark = _MARKS.get(str(value).strip().lower())
    if mark is None:
        raise useless_value(location, column, readable(str(value)), "0 or 1")
    return mark


def _words_or_text(value: Any) -> Any:
    """A text, or a list of words; other lists in CSV files, such as ``[1]``, are texts."""
    words = list_of(value)
    return words if is_list_of(words, str) else value


class PreferenceRow(NamedTuple):
    """An answer that was chosen before another one, or an answer that was judged by itself."""

    answer: Chat
    """Prompt with the chosen answer, or with the judged one."""
    rejected: Chat | None
    """Prompt with the rejected answer; None if the answer was judged."""
    desirable: bool = True
    """Whether the answer is desirable; of two answers the chosen one is desirable."""
    margin: float | None = None
    """Number by which the chosen answer is better; None without."""


def preferences(options: PrepareOptions, account: Account) -> Iterator[PreferenceRow]:
    """The preferences of a source, up to the number asked for.

    Raises:
        DataError: there is no such source, it is damaged, or a row has no preference.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    yield from counted_records(read(options, PreferenceReader(options), account), options.max_documents, account)


class PreferenceReader:
    """Reads preferences: rows of a table with two answers, or with an answer and its judgement."""

    def __init__(self, options: PrepareOptions) -> None:
        self._options = options
        self._prompt = Column(options.prompt_column or "prompt", "--prompt-column")
        self._chosen = Column(options.chosen_column or "chosen", "--chosen-column")
        self._rejected = Column(options.rejected_column or "rejected", "--rejected-column")
        self._margin = Column(options.margin_column or "margin", "--margin-column")
        self._completion = Column(options.completion_column or "completion", "--completion-column")
        self._desirable = Column(options.desirable_column or "label", "--desirable-column")

    @property
    def columns(self) -> tuple[Column, ...]:
        """Empty: the columns are recognised by the first row."""
        return ()

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[PreferenceRow]:
        """The preferences of rows; those without text are put into the account.

        Raises:
            DataError: a row lacks a column, or has something else than an answer in it.

        """
        columns: tuple[Column, ...] = ()
        for location, row in rows:
            columns = columns or self._recognised(location, row)
            beside = columns_beside(self._prompt, self._options)
            used_columns = {column.name for column in columns}
            if self._rejected in columns:
                used_columns.add(self._margin.name)
            account.drop(sorted(row.keys() - used_columns - beside))
            require_columns(location, row, columns)
            if self._rejected in columns and self._prompt not in columns:
                self._refuse_late_prompt(location, row)
            blank = blank_column(columns, row)
            if blank is not None:
                account.leave_out("rows", f"without a value in {readable(blank)}")
            elif self._desirable in columns:
                yield self._judged(location, row)
            else:
                yield from self._compared(location, row, columns, account)

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[PreferenceRow]:
        """Refuse a plain text: it has no columns."""
        del file, is_only_file
        raise no_table(path, "preferences")

    def _recognised(self, location: str, row: Mapping[str, Any]) -> tuple[Column, ...]:
        """The columns of a table by its first row, and by the options."""
        options = self._options
        judged_columns = (self._prompt, self._completion, self._desirable)
        if options.desirable_column is not None:
            return judged_columns
        if options.chosen_column is None and all(column.name in row for column in judged_columns):
            return judged_columns
        if options.chosen_column is None and self._chosen.name not in row:
            names = ", ".join(sorted(map(readable, row)))
            fix = "name columns with --chosen-column and --rejected-column, or with --desirable-column"
            raise DataError("DATA032", f"{location} has no preference", names, _KINDS, fix)
        if options.prompt_column is not None or self._prompt.name in row:
            return self._chosen, self._rejected, self._prompt
        return self._chosen, self._rejected

    def _refuse_late_prompt(self, location: str, row: Mapping[str, Any]) -> None:
        """Refuse a prompt that the first row has no column for: the answers would be trained without it."""
        if blank_column([self._prompt], {self._prompt.name: None, **row}) is None:
            problem = f"{location} has a column {readable(self._prompt.name)!r}, and the first row has none"
            raise DataError(
                "DATA032", problem, fix="give all rows a prompt, or put those without one into another source"
            )

    def _judged(self, location: str, row: Mapping[str, Any]) -> PreferenceRow:
        value = row[self._desirable.name]
        desirable = _JUDGEMENTS.get(str(value).strip().lower())
        if desirable is None:
            raise useless_value(location, self._desirable, repr(value), "true or false")
        answer = self._answer(location, row, self._completion)
        prompt, answer = split_answer(self._prompt_messages(location, row), answer)
        return PreferenceRow(self._chat(location, row, prompt, answer), None, desirable)

    def _compared(
        self, location: str, row: Mapping[str, Any], columns: tuple[Column, ...], account: Account
    ) -> Iterator[PreferenceRow]:
        """The preference of a row; one whose answers can't be told apart is put into the account."""
        margin = self._number(location, row)
        if self._prompt in columns and not self._repeats_prompt(location, row):
            prompt = self._prompt_messages(location, row)
            chosen = self._answer(location, row, self._chosen)
            rejected = self._answer(location, row, self._rejected)
        elif self._options.is_templated:
            prompt, chosen, rejected = self._common_messages(location, row)
        else:
            prompt, chosen, rejected = self._common_text(location, row)
        if chosen == rejected:
            account.leave_out("rows", "whose two answers are the same")
        elif not chosen or not rejected:
            account.leave_out("rows", "of which one answer is the beginning of the other, and no prompt is given")
        else:
            answer = self._chat(location, row, prompt, chosen)
            yield PreferenceRow(answer, self._chat(location, row, prompt, rejected), True, margin)

    def _number(self, location: str, row: Mapping[str, Any]) -> float | None:
        value: Any = row.get(self._margin.name)
        if no_label(value):
            return None
        with suppress(TypeError, ValueError):
            number = float(value)
            if abs(number) <= _LARGEST_MARGIN and not isinstance(value, bool):
                return number
        raise useless_value(location, self._margin, repr(value), "a finite number up to 1e38")

    def _prompt_messages(self, location: str, row: Mapping[str, Any]) -> Messages:
        if self._options.is_templated:
            messages = given_before(exchange(location, self._prompt, row, "user"))
        else:
            messages = [plain_message(location, self._prompt, row)]
        messages[-1]["content"] += input_text(self._prompt, row)
        return messages

    def _repeats_prompt(self, location: str, row: Mapping[str, Any]) -> bool:
        """Whether both answers are whole conversations, which begin with the prompt."""
        if not self._options.is_templated:
            return False
        prompt = self._prompt_messages(location, row)
        for column in (self._chosen, self._rejected):
            answer = self._answer(location, row, column)
            is_whole = isinstance(messages_of(row[self._prompt.name]), str) and answer[0]["role"] != "assistant"
            if not is_whole and len(split_answer(prompt, answer)[1]) == len(answer):
                return False
        return True

    def _answer(self, location: str, row: Mapping[str, Any], column: Column) -> Messages:
        if self._options.is_templated:
            return exchange(location, column, row, "assistant")
        return [plain_message(location, column, row)]

    def _common_messages(self, location: str, row: Mapping[str, Any]) -> tuple[Messages, Messages, Messages]:
        """Messages that both conversations begin with, and those behind them."""
        for column in (self._chosen, self._rejected):
            if isinstance(messages_of(row[column.name]), str):
                raise _without_prompt(location, column, "a text")
        chosen = self._answer(location, row, self._chosen)
        rejected = self._answer(location, row, self._rejected)
        common_words = 0
        while common_words < min(len(chosen), len(rejected)) and chosen[common_words] == rejected[common_words]:
            common_words += 1
        if common_words == 0 and chosen[0]["role"] == "assistant":
            raise _without_prompt(location, self._chosen, "a message of the assistant")
        return given_before(chosen[:common_words]), chosen[common_words:], rejected[common_words:]

    def _common_text(self, location: str, row: Mapping[str, Any]) -> tuple[Messages, Messages, Messages]:
        """Text that both answers begin with, without a space at its end, and the texts behind it."""
        (chosen,) = self._answer(location, row, self._chosen)
        (rejected,) = self._answer(location, row, self._rejected)
        texts = chosen["content"], rejected["content"]
        common_messages = 0
        while common_messages < min(map(len, texts)) and texts[0][common_messages] == texts[1][common_messages]:
            common_messages += 1
        if common_messages and common_messages < min(map(len, texts)) and texts[0][common_messages - 1] == " ":
            common_messages -= 1
        prompt = {"role": "user", "content": texts[0][:common_messages]}
        sides: list[Messages] = []
        for message in (chosen, rejected):
            rest = message["content"][common_messages:]
            sides.append([message | {"content": rest}] if rest else [])
        return [prompt], sides[0], sides[1]

    def _chat(self, location: str, row: Mapping[str, Any], prompt: Messages, answer: Messages) -> Chat:
        messages = [*prompt, *answer]
        if not self._options.is_templated:
            return Chat(location, messages)
        return Chat(location, with_system(messages, system_of(row), self._options), tools_of(location, row))


def _without_prompt(location: str, column: Column, got: str) -> DataError:
    problem = f"{location}: column {readable(column.name)!r} has an answer without a prompt"
    allowed = "a list of messages with the prompt, or answers beside a column of prompts"
    return DataError("DATA031", problem, got, allowed, "name the column of prompts with --prompt-column")
