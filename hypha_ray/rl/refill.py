"""Prompts in the place of those whose groups have no signal, as in DAPO's dynamic sampling (arXiv 2503.14476).

batch ─► responses, rewards ─┬─► groups with a signal ──────────────────────────────► the batch that is trained on
             ▲               └─► others: as many of the round's next prompts ─┐
             └────────────────────────────────────────────────────────────────┘ up to `rl.refill` times
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.rl.dataflow.requests import Reply
from hypha_ray.rl.packing import prompt_ids
from hypha_ray.types import Samples, joined

Rollout: TypeAlias = Callable[[Samples], Mapping[str, Sequence[Reply]]]
"""Function that responds to prompts and rewards the responses; it returns the replies by the names of calls."""


@dataclass(frozen=True, slots=True)
class Refilled:
    """Batch whose groups have a signal, as far as there were prompts."""

    batch: Samples
    """Prompts that are trained on; all of the first draw if none has a signal."""
    draws: tuple[Mapping[str, Sequence[Reply]], ...]
    """Replies of each draw."""
    left_out: tuple[str, ...]
    """Ids of the prompts that aren't trained on."""
    extra: int
    """Number of prompts that were drawn beside those of the batch."""


class Refill:
    """Refill of batches.

    Args:
        draws: largest number of draws of further prompts for a batch.

    """

    def __init__(self, draws: int) -> None:
        self._draws = draws
        self._upcoming: Iterator[Samples] = iter(())
        self._next: list[Samples] = []
        """Batches after the present one that have been read."""

    def announce(self, upcoming: Iterator[Samples]) -> None:
        """Take in the batches that come next in the round; they are read when they are needed."""
        self._upcoming = upcoming
        self._next = []

    def refilled(self, batch: Samples, rollout: Rollout) -> Refilled:
        """Respond to a batch, and to further prompts in the place of those without a signal.

        A repeated call for the same batch draws the same prompts.
        """
        prompts = batch
        parts: list[Samples] = []
        left_out: list[str] = []
        draws: list[Mapping[str, Sequence[Reply]]] = []
        missing = len(batch)
        extra = 0
        for draw in range(self._draws + 1):
            replies = rollout(prompts)
            draws.append(replies)
            without_signal = _without_signal(replies)
            ids = prompt_ids(prompts.keys)
            has_signal = ~np.isin(ids, list(without_signal))
            left_out += filter(without_signal.__contains__, ids)
            parts.append(_rows(prompts, has_signal))
            missing -= int(has_signal.sum())
            if not missing or draw == self._draws:
                break
            prompts = self._take(extra, missing)
            if not len(prompts):
                break
            extra += len(prompts)
        if missing == len(batch):
            parts = [batch]
            del left_out[: len(batch)]
        return Refilled(joined(parts), tuple(draws), tuple(left_out), extra)

    def _take(self, start: int, count: int) -> Samples:
        """Return up to `count` of the prompts that come next, from `start` on; none if there are no more."""
        while sum(map(len, self._next)) < start + count:
            batch = next(self._upcoming, None)
            if batch is None:
                break
            self._next.append(batch)
        if not self._next:
            return Samples({}, np.empty((0, 3), np.int64))
        return _rows(joined(self._next), slice(start, start + count))


def _rows(samples: Samples, rows: npt.NDArray[np.bool_] | slice) -> Samples:
    return Samples({name: array[rows] for name, array in samples.arrays.items()}, samples.keys[rows])


def _without_signal(replies: Mapping[str, Sequence[Reply]]) -> set[str]:
    ids: set[str] = set()
    for reply in replies["rew_inf"]:
        ids.update(reply.facts["without_signal"])
    return ids
