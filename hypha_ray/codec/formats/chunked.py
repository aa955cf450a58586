"""Codecs that encode a delta chunk by chunk: fewer bits an element, and for some a scale a chunk.

A payload has a few arrays for each group of parameters, such as ``parameters/float32/codes`` and ``…/scales``; buffers
travel as they are. A chunk has the same number of elements in each array, so any block is decoded by itself. The last
chunk is filled up with zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch

from hypha_ray.codec.base import Form
from hypha_ray.types import Flat
from hypha_ray.types.layout import dtype_of, is_trained

Parts = dict[str, torch.Tensor]
"""The arrays of a run of chunks, by name: one row a chunk."""


class Chunked(ABC):
    """Common part of codecs that work by chunks."""

    name: str
    chunk: int
    """Elements of a chunk; divides `BLOCK`."""
    arrays: ClassVar[Mapping[str, tuple[str, int]]]
    """Numpy's dtype of each array, and its elements for one chunk."""
    yields: Literal["weights", "deltas"] = "deltas"

    @abstractmethod
    def compress(self, values: torch.Tensor) -> Parts:
        """Encode float32 values of shape (chunks, `chunk`); values that aren't finite decode to some that aren't."""

    @abstractmethod
    def expand(self, parts: Parts) -> torch.Tensor:
        """Decode to float32 of shape (chunks, `chunk`)."""

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """The arrays of each group of parameters, and one for each other group."""
        found: dict[str, Form] = {}
        for group, size in groups.items():
            if is_trained(group):
                found |= {f"{group}/{name}": form for name, form in self._forms(size).items()}
            else:
                found[group] = Form(dtype_of(group), size)
        return found

    def decode(self, payload: Mapping[str, torch.Tensor], group: str, part: slice) -> torch.Tensor:
        """Decode whole chunks; past the end of the group there may be a few zeros, or what a stranger has put there."""
        if not is_trained(group):
            return payload[group][part]
        start = part.start or 0
        stop = part.stop
        first = start // self.chunk
        last = None if stop is None else -(-stop // self.chunk)
        values = self.expand(self.rows(payload, group, slice(first, last))).view(-1)
        return values[: None if stop is None else stop - start].to(getattr(torch, dtype_of(group)))

    def rows(self, payload: Mapping[str, torch.Tensor], group: str, part: slice) -> Parts:
        """The arrays of a run of chunks, out of a payload."""
        return {name: payload[f"{group}/{name}"].view(-1, n)[part] for name, (_, n) in self.arrays.items()}

    def rooms(self, size: int) -> Flat:
        """Arrays for `encode_block` to write to, for a group of this size."""
        return {name: np.empty(form.size, form.dtype) for name, form in self._forms(size).items()}

    def _forms(self, size: int) -> dict[str, Form]:
        chunks = -(-size // self.chunk)
        return {name: Form(dtype, chunks * n) for name, (dtype, n) in self.arrays.items()}

    def pack(self, arrays: Flat) -> Flat:
        """Payload of these arrays, once all blocks are written."""
        return arrays

    def encode_block(self, values: torch.Tensor, out: Mapping[str, torch.Tensor], start: int) -> torch.Tensor:
        """Encode a block of float32 values.

        Args:
            values: 1-D.
            out: the group's `rooms`, by name, of shape (chunks, n); the block's rows are written.
            start: the block's first element in the group.

        Returns:
            The values as they will be decoded.

        """
        padded = torch.nn.functional.pad(values, (0, -len(values) % self.chunk)).view(-1, self.chunk)
        parts = self.compress(padded)
        rows = slice(start // self.chunk, start // self.chunk + len(padded))
        for name, array in parts.items():
            out[name][rows] = array
        return self.expand(parts).view(-1)[: len(values)]
