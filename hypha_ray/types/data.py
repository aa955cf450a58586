"""Samples of a dataset: slices, runs of samples, samples in memory, token rules; and places of a model's tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(**options: bool) -> Callable[[type], type]:
        """Decorate a dataclass that only the type check keeps frozen: it is made in a sixth of the time."""
        return dataclass(**options | {"frozen": False, "unsafe_hash": True})


Arrays = dict[str, npt.NDArray[np.generic]]
"""A slice or a batch: tensor name to array, the first dimension counts samples."""
SLICES_PER_PART = 1 << 20
"""Numbers of slices of one part of a dataset: those of part i begin at i times this."""
SLICES_PER_DATASET = 1 << 30
"""Numbers of slices of one dataset in a mixture: those of dataset d begin at d times this."""
Flat = dict[str, npt.NDArray[np.generic]]
"""A fragment's tensors as they travel: group name to one contiguous 1-D array."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of slices, and the place that each of them comes from.

    `keys` is int64 [N, 3]: epoch, slice, and the sample's index in the slice's file. Validation is in epoch 0.
    """

    arrays: Arrays
    keys: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, rows: slice | npt.NDArray[np.bool_]) -> Samples:
        """Return some of the samples."""
        arrays = {name: array[rows] for name, array in self.arrays.items()}
        return Samples(arrays, self.keys[rows])


def joined(parts: Sequence[Samples]) -> Samples:
    """All samples of these, which have the same tensors, in order; prompts of unequal length are padded."""
    if len(parts) == 1:
        return parts[0]
    arrays: Arrays = {}
    for name in parts[0].arrays:
        arrays[name] = _join_arrays(name, [part.arrays[name] for part in parts])
    return Samples(arrays, np.concatenate([part.keys for part in parts]))


def _join_arrays(name: str, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join arrays; those of two dimensions may be padded, records of prompts behind and tokens before them."""
    if len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    padded_arrays: list[npt.NDArray[Any]] = []
    for part in parts:
        missing = width - part.shape[1]
        columns = (0, missing) if name == "reward_data" else (missing, 0)
        padded_arrays.append(np.pad(part, ((0, 0), columns)))
    return np.concatenate(padded_arrays)


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """One file of a prepared dataset, as its manifest lists it.

    `xxh3` is its XXH3 of 128 bits in hexadecimal, seeded by the XXH3 of 64 bits of its sha256 in hexadecimal; None in
    manifests of older releases.
    """

    index: int
    file: str
    sha256: str
    samples: int
    split: str = "train"
    xxh3: str | None = None


class Span(NamedTuple):
    """Samples ``start … stop - 1`` of a slice, in that epoch's order."""

    epoch: int
    slice: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start


def dataset_of(index: int) -> int:
    """Number of the dataset in a mixture that a slice is of."""
    return index // SLICES_PER_DATASET


def samples_of(spans: Iterable[Span]) -> int:
    """Number of samples of some spans."""
    samples = 0
    for _, _, start, stop in spans:
        samples += stop - start
    return samples


def window(spans: Iterable[Span], start: int, stop: int) -> tuple[Span, ...]:
    """Samples ``start … stop - 1`` of the spans taken together."""
    parts: list[Span] = []
    for epoch, index, begin, end in spans:
        if stop <= 0:
            break
        samples = end - begin
        first_sample = max(start, 0)
        stop_sample = min(stop, samples)
        if first_sample < stop_sample:
            parts.append(Span(epoch, index, begin + first_sample, begin + stop_sample))
        start -= samples
        stop -= samples
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Decisions of a preparation about tokens, which training, generation and export obey.

    `begin` are the ids that begin a text, a pair or a prompt without a template; empty if nothing does. `ends` are the
    ids that end texts and answers: generation stops at any of them. `vocab_size` is the number of the tokenizer's
    tokens, and one more than its largest id; a model's further ids stand for nothing. `template_sha256` is the hash of
    the chat template's text in UTF-8; None without a template. `system` is the message that was put before chats
    without one; None if there is none.
    """

    begin: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    vocab_size: int | None = None
    template_sha256: str | None = None
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of one tensor: elements ``offset … offset + size - 1`` of a group of a fragment.

    `dtype` is the tensor's own, by its torch name without the prefix (``bfloat16``); the group's is at least float32.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fragment: int
    group: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's trained parameters and its buffers as flat arrays, the same on every machine.

    Groups are named ``parameters/float32``, ``buffers/float32``, ``buffers/int64``: parameters take outer steps, float
    buffers are averaged, integer buffers taken from one worker. A tied tensor stands once, under its first name.
    """

    entries: tuple[Entry, ...]
    tied: tuple[tuple[str, str], ...] = ()
    fragments: int = 1
    frozen_sha256: str | None = None
    """Fingerprint of the weights below an adapter, which don't travel; None without an adapter."""

    def groups(self, fragment: int) -> dict[str, int]:
        """Sizes of a fragment's groups, in elements."""
        sizes: dict[str, int] = {}
        for entry in self.entries:
            if entry.fragment == fragment:
                end = entry.offset + entry.size
                sizes[entry.group] = max(sizes.get(entry.group, 0), end)
        return sizes

    def bytes(self, *fragments: int) -> int:
        """Size of these fragments, or of all, in bytes."""
        total = 0
        for fragment in fragments or range(self.fragments):
            for group, elements in self.groups(fragment).items():
                total += elements * np.dtype(dtype_of(group)).itemsize
        return total

    def parameters(self, *fragments: int) -> int:
        """Number of trained parameters of these fragments, or of all; tied ones count once."""
        total = 0
        for fragment in fragments or range(self.fragments):
            for group, elements in self.groups(fragment).items():
                if is_trained(group):
                    total += elements
        return total

    def sha256(self) -> str:
        """Fingerprint by which two processes know that they mean the same model."""
        fields: tuple[object, ...] = (self.entries, self.tied, self.fragments)
        if self.frozen_sha256 is not None:
            fields = (*fields, self.frozen_sha256)
        text = repr(fields)
        return hashlib.sha256(text.encode()).hexdigest()


def is_trained(group: str) -> bool:
    """Whether a group is one of parameters, which are encoded and stepped; buffers are passed on and averaged."""
    return group.startswith("parameters/")


def dtype_of(group: str) -> str:
    """Numpy's name of the dtype of a group's array."""
    return group.rpartition("/")[2]
