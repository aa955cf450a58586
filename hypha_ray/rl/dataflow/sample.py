"""Samples of an island: sequences of unequal length, packed one after the other under each key.

A sample belongs to a prompt and is known by its id. A key such as ``responses`` holds one or more sequences of each
prompt, for example its group of responses. Nothing is padded, and arrays keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Packed: TypeAlias = npt.NDArray[Any]
"""Array [sum of the lengths of all sequences, ...]."""
Lengths: TypeAlias = tuple[tuple[int, ...], ...]
"""Lengths of the sequences of each id, in the order of the ids."""


@dataclass(frozen=True)
class Meta:
    """Description of samples without their arrays; a master sees nothing else of them.

    Raises:
        ValueError: an id is there twice, or a key hasn't lengths for each id.

    """

    ids: tuple[str, ...]
    """Ids of the prompts, each once."""
    lengths: Mapping[str, Lengths]
    """Lengths of the sequences under each key."""

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("ids of samples must differ")
        for key, lengths in self.lengths.items():
            if len(lengths) != len(self.ids):
                raise ValueError(f"{key} has lengths for {len(lengths)} ids of {len(self.ids)}")

    def tokens(self, key: str) -> tuple[int, ...]:
        """Return the total length of each id's sequences under a key."""
        return tuple(map(sum, self.lengths[key]))

    def flat(self, key: str) -> list[int]:
        """Return the length of each sequence under a key."""
        return list(chain.from_iterable(self.lengths[key]))


@dataclass(frozen=True)
class Sample:
    """Samples with their arrays.

    Raises:
        ValueError: the arrays don't have the keys or the lengths that `meta` says.

    """

    meta: Meta
    """Ids and lengths."""
    data: Mapping[str, Packed]
    """Packed array of each key of `meta`."""

    def __post_init__(self) -> None:
        if self.data.keys() != self.meta.lengths.keys():
            raise ValueError(f"keys of the arrays, {sorted(self.data)}, aren't those of the lengths")
        for key, array in self.data.items():
            total = sum(self.meta.tokens(key))
            if len(array) != total:
                raise ValueError(f"{key} has {len(array)} rows, its lengths add up to {total}")

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the prompts."""
        return self.meta.ids

    def select(self, keys: Iterable[str]) -> Sample:
        """Return the same ids with some of the keys."""
        lengths: dict[str, Lengths] = {}
        data: dict[str, Packed] = {}
        for key in keys:
            lengths[key] = self.meta.lengths[key]
            data[key] = self.data[key]
        return Sample(Meta(self.ids, lengths), data)

    def take(self, ids: Sequence[str]) -> Sample:
        """Return some of the ids, in the order given."""
        if tuple(ids) == self.ids:
            return self
        row_of = {name: row for row, name in enumerate(self.ids)}
        rows = [row_of[name] for name in ids]
        lengths: dict[str, Lengths] = {}
        data: dict[str, Packed] = {}
        for key, array in self.data.items():
            lengths_of_key = self.meta.lengths[key]
            bounds = list(accumulate(self.meta.tokens(key), initial=0))
            parts = [array[bounds[row] : bounds[row + 1]] for row in rows]
            lengths[key] = tuple(lengths_of_key[row] for row in rows)
            data[key] = np.concatenate([array[:0], *parts])
        return Sample(Meta(tuple(ids), lengths), data)

    def update(self, sample: Sample) -> Sample:
        """Return the samples with the keys of another one, whose ids are the same in any order."""
        if set(sample.ids) != set(self.ids):
            raise ValueError("samples can only be given keys of the same ids")
        added = sample.take(self.ids)
        lengths = {**self.meta.lengths, **added.meta.lengths}
        return Sample(Meta(self.ids, lengths), {**self.data, **added.data})


def gather(samples: Sequence[Sample]) -> Sample:
    """Join samples of different ids that have the same keys, in their order."""
    if len(samples) == 1:
        return samples[0]
    ids = tuple(chain.from_iterable(sample.ids for sample in samples))
    lengths: dict[str, Lengths] = {}
    data: dict[str, Packed] = {}
    for key in samples[0].data:
        lengths[key] = tuple(chain.from_iterable(sample.meta.lengths[key] for sample in samples))
        data[key] = np.concatenate([sample.data[key] for sample in samples])
    return Sample(Meta(ids, lengths), data)
