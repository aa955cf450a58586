"""Copies from ordinary memory to a GPU, by way of a few pinned buffers that take turns.

    host      read chunk 1 | read chunk 2 | read chunk 3 | …
    transfer               | send chunk 1 | send chunk 2 | …

A GPU reads pinned memory several times faster than other memory. Pinning takes as long as some copies, so the buffers
are made once, and large arrays go through them in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Protocol

import torch

from hypha_ray.kernels import copy

_CHUNK_BYTES = 32 << 20
"""Size of a buffer."""
_BUFFERS = 3
"""Buffers of a device: one that is read into, one that is sent, and one between them."""
_ALIGNED_BYTES = 256
"""Multiple at which a tensor begins in a buffer."""


class Sent(Protocol):
    """Point in the order of a device's work, such as an event."""

    def synchronize(self) -> None:
        """Wait until all work before it is done."""
        ...


class Transfers(Protocol):
    """Transfers to a device, which go on beside the host and in the order of their calls."""

    def buffer(self, size: int) -> torch.Tensor:
        """Return memory to send from: `size` bytes, as uint8."""
        ...

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy from a part of a buffer."""
        ...

    def mark(self) -> Sent:
        """Return the point after all transfers so far."""
        ...


class GpuTransfers:
    """Transfers on the current stream of a GPU, so that kernels before and after them see the right values.

    Args:
        device: the GPU.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, size: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Sent:
        """Record an event."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


class Staging:
    """Buffers of a device, and the copies through them.

    Args:
        transfers: transfers to the device.
        chunk_bytes: size of a buffer.
        buffers: number of buffers.

    """

    def __init__(self, transfers: Transfers, chunk_bytes: int = _CHUNK_BYTES, buffers: int = _BUFFERS) -> None:
        self._transfers = transfers
        self._size = chunk_bytes
        self._buffers = [transfers.buffer(chunk_bytes) for _ in range(buffers)]
        self._sent: list[Sent | None] = [None] * buffers
        """Points after which each buffer is free; None for a buffer that was never sent."""
        self._turn = 0
        self._used = 0
        """Index of the buffer that is filled now, and the number of its bytes that are in use."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy as ``target.copy_(source)``. All of `source` is read when this returns; `target` is written later.

        Values are converted to the target's dtype on the host, so that fewer bytes are sent.

        Args:
            source: contiguous, in any memory of the host.
            target: contiguous, on the device, of the same shape.

        """
        source_values = source.view(-1)
        target_values = target.view(-1)
        start = 0
        for chunk in self._free_chunks(len(source_values), target.dtype):
            part = slice(start, start + len(chunk))
            chunk.copy_(source_values[part])
            self._transfers.send(chunk, target_values[part])
            start += len(chunk)

    def _free_chunks(self, elements: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Return parts of buffers for this number of elements in all, each as soon as it is free."""
        while elements:
            begin = -(-self._used // _ALIGNED_BYTES) * _ALIGNED_BYTES
            fitting = min(elements, (self._size - begin) // dtype.itemsize)
            if fitting <= 0:
                self._advance()
                continue
            self._used = begin + fitting * dtype.itemsize
            elements -= fitting
            buffer = self._buffers[self._turn]
            yield buffer[begin : self._used].view(dtype)

    def _advance(self) -> None:
        """Go on to the next buffer, and wait until its last transfer has ended."""
        self._sent[self._turn] = self._transfers.mark()
        self._turn = (self._turn + 1) % len(self._buffers)
        self._used = 0
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()


@cache
def staging_of(device: torch.device) -> Staging:
    """Return the buffers of a GPU, which all copies of this process share; not for two threads at the same time."""
    return Staging(GpuTransfers(device))


def copy_in(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy as ``target.copy_(source)``; from the host to a GPU through its buffers."""
    if target.is_cuda and source.is_cpu and source.is_contiguous() and target.is_contiguous():
        staging_of(target.device).copy(source, target)
    else:
        copy(source, target)


def to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device, as ``source.to(device)``."""
    if device.type != "cuda":
        return source.to(device)
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    copy_in(source, target)
    return target
