"""A response to a prompt as reward functions get it, and records of prompts as they lie in slices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hypha_ray.config.schema import Rounds
from hypha_ray.errors import DataError

_TUPLE = "hypha_ray:tuple"
_PAIRS = "hypha_ray:pairs"


class TrainerState(SimpleNamespace):
    """Progress of a run, by names of the state of transformers' trainer; other attributes of that aren't here."""

    global_step: int
    """Number of rounds that the weights of the round's beginning have had."""
    epoch: float
    """Number of the epoch that the prompt is drawn in, from 0."""
    max_steps: int
    """Number of rounds of the run; absent if it isn't known."""

    @classmethod
    def of(cls, rounds: Rounds, round: int, epoch: int) -> TrainerState:
        """Return the state in a round, for a prompt of an epoch."""
        state = cls(global_step=round, epoch=float(epoch))
        if rounds.counted:
            state.max_steps = rounds.update_rounds
        return state

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what isn't known.

        Raises:
            AttributeError: always, because Python asks only for attributes that are absent.

        """
        known_names = ", ".join(self.__dict__)
        raise AttributeError(f"trainer_state has no {name!r} here, only {known_names}")


@dataclass(frozen=True, slots=True)
class Response:
    """A response to a prompt."""

    prompt: str
    """Text of the prompt."""
    text: str
    """Text of the response, without the end token and other special tokens."""
    ids: tuple[int, ...]
    """Token ids of the response, the end token included."""
    ended: bool
    """Whether the model ended the response itself; otherwise it was cut at the largest number of tokens."""
    data: Mapping[str, Any]
    """Record of the prompt in the dataset: ``task``, ``answer``, and other columns if there are any."""
    most_tokens: int
    """Largest number of tokens that a response may have."""
    is_chat: bool = False
    """Whether the prompt was put into a chat template."""
    conversation: tuple[Mapping[str, str], ...] = ()
    """Turns behind the prompt, each with `content` and `role`, ``assistant`` or ``environment``; empty without an
    environment. With one, `text` is the policy's last turn, and `ids` are those of all its turns."""
    episode_reward: float | None = None
    """Sum of the rewards that the environment gave; None without one, or if the episode has failed."""
    trainer_state: TrainerState | None = None
    """Progress of the run; None outside of one."""

    @property
    def completion(self) -> str | list[dict[str, str]]:
        """The response as trl's functions take it: its text, or after a chat the message of the assistant.

        A conversation with an environment is the list of its turns.
        """
        if self.conversation:
            return [dict(turn) for turn in self.conversation]
        if self.is_chat:
            return [{"role": "assistant", "content": self.text}]
        return self.text

    @property
    def answer(self) -> str:
        """Right answer.

        Raises:
            KeyError: the dataset has none for this prompt.

        """
        return str(self.data["answer"])


def records_of(rows: npt.NDArray[np.generic]) -> list[dict[str, Any]]:
    """Return the record of each prompt.

    Args:
        rows: the tensor `reward_data` of a slice, uint8 [N, A].

    Raises:
        DataError: RL029, a row isn't the JSON of a record.

    """
    return [_record(number, row) for number, row in enumerate(np.asarray(rows))]


def _record(number: int, row: npt.NDArray[np.generic]) -> dict[str, Any]:
    try:
        (record,) = unpack_records(row[None])
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        problem = "a slice of prompts has a damaged record"
        fix = "prepare the dataset again by jobs/prepare.py"
        raise DataError("RL029", problem, f"row {number} of reward_data", "the JSON of a table", fix)
    return record


def to_json(record: Mapping[str, Any]) -> str:
    """Write a record as JSON, in one line, which keeps tuples and keys that aren't text.

    Functions that score answers compare grids, which are tuples of tuples, with `==`.

    Raises:
        TypeError: a value is none of JSON's, and no tuple.

    """
    return json.dumps(_marked(record), ensure_ascii=False, separators=(",", ":"))


def from_json(text: str | bytes) -> dict[str, Any]:
    """Read what `to_json` wrote, or any other table in JSON."""
    record: dict[str, Any] = json.loads(text, object_hook=_unmarked)
    return record


def _marked(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(part) for part in value]}
    if isinstance(value, list):
        return [_marked(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _marked(part) for key, part in value.items()}
    return {_PAIRS: [[_marked(key), _marked(part)] for key, part in value.items()]}


def _unmarked(table: dict[str, Any]) -> Any:
    if len(table) == 1 and isinstance(parts := table.get(_TUPLE), list):
        return tuple(parts)
    if len(table) == 1 and isinstance(pairs := table.get(_PAIRS), list):
        return dict(pairs)
    return table


def pack_records(records: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.uint8]:
    """Encode records as a slice's tensor ``reward_data``: uint8 [N, A], where A is the length of the longest one.

    A row is JSON in UTF-8 with zeros behind it, such as ``{"task": "gsm8k", "answer": "72"}``.

    Raises:
        TypeError: a value is none of JSON's, and no tuple.

    """
    texts = [to_json(record).encode() for record in records]
    rows = np.zeros((len(texts), max(map(len, texts))), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return rows


def unpack_records(rows: npt.NDArray[np.generic]) -> list[dict[str, Any]]:
    """Decode a result of `pack_records`."""
    records: list[dict[str, Any]] = []
    for row in np.asarray(rows, np.uint8):
        text = bytes(row).rstrip(b"\0")
        records.append(from_json(text))
    return records
