"""Sources of preferences: tables whose rows have two answers, of which one was chosen, or one answer with a judgement.

    prompt, chosen, rejected      texts, or lists of messages
    chosen, rejected              the same; the prompt is what both begin with
    margin                        beside them: a number by which the chosen answer is better
    prompt, completion, label     a text or messages, and whether the answer is desirable

Columns are named as in TRL, unless options name others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from hypha_ray.data.preparation.options import PrepareOptions
from hypha_ray.data.preparation.sources.chats import (
    BESIDE_CHATS,
    Chat,
    Messages,
    blank_column,
    exchange,
    given_before,
    messages_of,
    plain_message,
    split_answer,
    tools_of,
    with_system,
)
from hypha_ray.data.preparation.sources.documents import counted_records, read
from hypha_ray.data.preparation.sources.labelled import no_label
from hypha_ray.data.preparation.sources.tables import Column, Row, no_table, require_columns, useless_value
from hypha_ray.data.provenance import Account, readable
from hypha_ray.errors import DataError

_KINDS = "chosen and rejected; prompt, completion and label"
_LARGEST_MARGIN: Final = 1e38
"""Margins are stored in 32 bits, which hold no larger numbers."""
_JUDGEMENTS: Final = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Judgements by their texts in CSV files; tables with gaps have whole numbers as floats."""


class PreferenceRow(NamedTuple):
    """An answer that was chosen before another one, or an answer that was judged by itself."""

    answer: Chat
    """Prompt with the chosen answer, or with the judged one."""
    rejected: Chat | None
    """Prompt with the rejected answer; None if the answer was judged."""
    desirable: bool = True
    """Whether the answer is desirable; of two answers the chosen one is."""
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
            beside = BESIDE_CHATS if self._options.is_templated else frozenset[str]()
            used = {column.name for column in columns}
            if self._rejected in columns:
                used.add(self._margin.name)
            account.drop(sorted(row.keys() - used - beside))
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

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[PreferenceRow]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, "preferences")

    def _recognised(self, location: str, row: Mapping[str, Any]) -> tuple[Column, ...]:
        """The columns of a table by its first row, and by the options."""
        options = self._options
        judged = (self._prompt, self._completion, self._desirable)
        if options.desirable_column is not None:
            return judged
        if options.chosen_column is None and all(column.name in row for column in judged):
            return judged
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
            return given_before(exchange(location, self._prompt, row, "user"))
        return [plain_message(location, self._prompt, row)]

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
        common = 0
        while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
            common += 1
        if common == 0 and chosen[0]["role"] == "assistant":
            raise _without_prompt(location, self._chosen, "a message of the assistant")
        return given_before(chosen[:common]), chosen[common:], rejected[common:]

    def _common_text(self, location: str, row: Mapping[str, Any]) -> tuple[Messages, Messages, Messages]:
        """Text that both answers begin with, without a space at its end, and the texts behind it."""
        (chosen,) = self._answer(location, row, self._chosen)
        (rejected,) = self._answer(location, row, self._rejected)
        texts = chosen["content"], rejected["content"]
        common = 0
        while common < min(map(len, texts)) and texts[0][common] == texts[1][common]:
            common += 1
        if common and common < min(map(len, texts)) and texts[0][common - 1] == " ":
            common -= 1
        prompt = {"role": "user", "content": texts[0][:common]}
        sides: list[Messages] = []
        for message in (chosen, rejected):
            rest = message["content"][common:]
            sides.append([message | {"content": rest}] if rest else [])
        return [prompt], sides[0], sides[1]

    def _chat(self, location: str, row: Mapping[str, Any], prompt: Messages, answer: Messages) -> Chat:
        messages = [*prompt, *answer]
        if not self._options.is_templated:
            return Chat(location, messages)
        return Chat(location, with_system(messages, row, self._options), tools_of(location, row))


def _without_prompt(location: str, column: Column, got: str) -> DataError:
    problem = f"{location}: column {readable(column.name)!r} has an answer without a prompt"
    allowed = "a list of messages with the prompt, or answers beside a column of prompts"
    return DataError("DATA031", problem, got, allowed, "name the column of prompts with --prompt-column")
