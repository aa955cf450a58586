"""Codecs that encode a delta chunk by chunk, with fewer bits for each element, and some with a scale for each chunk.

A payload has a few arrays for each group of parameters, such as ``parameters/float32/codes`` and ``…/scales``; buffers
of the model are sent unencoded. All chunks have the same number of elements in an array, so any block can be decoded by
itself. The last chunk is padded with zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch

from hypha_ray.codec.base import Form
from hypha_ray.types import Flat
from hypha_ray.types.data import dtype_of, is_trained

Parts = dict[str, torch.Tensor]
"""Arrays of a range of chunks, by name: one row for each chunk."""


class Chunked(ABC):
    """Base class of codecs that encode chunk by chunk."""

    name: str
    chunk: int
    """Number of elements of a chunk; divides `BLOCK`."""
    arrays: ClassVar[Mapping[str, tuple[str, int]]]
    """Arrays of a group by name: numpy's dtype, and the number of elements for one chunk."""
    yields: Literal["weights", "deltas"] = "deltas"
    postpones: ClassVar[bool] = False
    """Whether changes may have to wait for many rounds until a payload has them."""

    @abstractmethod
    def compress(self, values: torch.Tensor) -> Parts:
        """Encode float32 values of shape (chunks, `chunk`); values that aren't finite decode to some that aren't."""

    @abstractmethod
    def expand(self, parts: Parts) -> torch.Tensor:
        """Decode to float32 of shape (chunks, `chunk`)."""

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe the arrays of each group of parameters, and the one array of each other group."""
        forms: dict[str, Form] = {}
        for group, elements in groups.items():
            if not is_trained(group):
                forms[group] = Form(dtype_of(group), elements)
                continue
            for name, form in self._forms(elements).items():
                forms[f"{group}/{name}"] = form
        return forms

    def decode(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode whole chunks.

        Padding past the end of the group is undefined; an untrusted sender may put anything there.
        """
        if not is_trained(group):
            return payload[group][part]
        start = part.start or 0
        stop = part.stop
        first_chunk = start // self.chunk
        end_chunk = None if stop is None else -(-stop // self.chunk)
        rows = self.rows(payload, group, slice(first_chunk, end_chunk))
        values = self.expand(rows).view(-1)
        if stop is not None:
            values = values[: stop - start]
        dtype: torch.dtype = getattr(torch, dtype_of(group))
        return values.to(dtype)

    def rows(self, payload: Mapping[str, torch.Tensor], group: str, part: slice) -> Parts:
        """Return the arrays of a range of chunks of a payload."""
        rows: Parts = {}
        for name, (_, columns) in self.arrays.items():
            array = payload[f"{group}/{name}"]
            rows[name] = array.view(-1, columns)[part]
        return rows

    def allocate(self, elements: int) -> Flat:
        """Allocate the arrays that `encode_block` writes to, for a group of this size."""
        return {name: np.empty(form.size, form.dtype) for name, form in self._forms(elements).items()}

    def _forms(self, elements: int) -> dict[str, Form]:
        """Describe the arrays of a group of this size."""
        chunks = -(-elements // self.chunk)
        return {name: Form(dtype, chunks * columns) for name, (dtype, columns) in self.arrays.items()}

    def pack(self, arrays: Flat) -> Flat:
        """Return the payload's arrays, once all blocks are written."""
        return arrays

    def upward(self) -> Chunked:
        """Return the codec of deltas, whose receiver has the weights that the sender began with."""
        return self

    def last(self) -> Chunked:
        """Return the codec of a run's last payload, whose encoding error no later payload can correct."""
        return self

    def downward(self) -> Chunked:
        """Return the codec of steps of the global weights, whose receivers have the weights before the step."""
        return self

    def encode_change(
        self, values: torch.Tensor, theta: torch.Tensor | None, out: Mapping[str, torch.Tensor], start: int
    ) -> torch.Tensor:
        """Encode a block of changes of θ as `encode_block` does; None: they aren't changes of known weights."""
        return self.encode_block(values, out, start)

    def advance_block(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Add a decoded block to the weights before a step, and write the sum to `out`."""
        torch.add(theta, self.decode(payload, group, part), out=out)

    def encode_block(self, values: torch.Tensor, out: Mapping[str, torch.Tensor], start: int) -> torch.Tensor:
        """Encode a block of float32 values.

        Args:
            values: 1-D.
            out: arrays of the group from `allocate`, by name, of shape (chunks, n); the block's rows are written.
            start: first element of the block in the group.

        Returns:
            The values as they will be decoded.

        """
        padding = -len(values) % self.chunk
        chunks = torch.nn.functional.pad(values, (0, padding)).view(-1, self.chunk)
        parts = self.compress(chunks)
        first_chunk = start // self.chunk
        for name, array in parts.items():
            out[name][first_chunk : first_chunk + len(chunks)].copy_(array, non_blocking=True)
        decoded = self.expand(parts).view(-1)
        return decoded[: len(values)]
