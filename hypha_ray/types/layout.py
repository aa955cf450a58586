"""Places of a model's tensors in the flat arrays that travel."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Flat = dict[str, npt.NDArray[np.generic]]
"""A fragment's tensors as they travel: group name to one contiguous 1-D array."""


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
            for group, size in self.groups(fragment).items():
                total += size * np.dtype(dtype_of(group)).itemsize
        return total

    def parameters(self, *fragments: int) -> int:
        """Number of trained parameters of these fragments, or of all; tied ones count once."""
        total = 0
        for fragment in fragments or range(self.fragments):
            for group, size in self.groups(fragment).items():
                if is_trained(group):
                    total += size
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
