"""Device, threads, memory and random numbers of a process that computes a model, and copies from the host to a GPU.

Copies go by way of a few pinned buffers that take turns:

    host      read chunk 1 | read chunk 2 | read chunk 3 | …
    transfer               | send chunk 1 | send chunk 2 | …

A GPU reads pinned memory several times faster than other memory. Pinning takes as long as some copies, so the buffers
are made once, and large arrays go through them in chunks.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from functools import cache
from typing import Protocol

import numpy as np
import torch

from hypha_ray.kernels import copy

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Names of options in ``malloc.h``."""
_KEPT_BYTES = 1 << 30
_LARGE_BYTES = 1 << 25
"""Largest amount of freed memory that is kept, and the size from which a block is always given back."""
_lease: dict[str, float] = {}
"""Number of GPUs in this process's lease, under `gpus`; empty without a lease, when the machine decides."""
_CHUNK_BYTES = 32 << 20
"""Size of a buffer."""
_BUFFERS = 3
"""Buffers of a device: one that is read into, one that is sent, and one between them."""
_ALIGNED_BYTES = 256
"""Multiple at which a tensor begins in a buffer."""


def use_gpus(leased_gpus: float) -> None:
    """Let `device_of` choose by the GPUs that this process has leased.

    Ray hides no GPU from a process that has leased none: it would use one that others pay for.
    """
    _lease["gpus"] = leased_gpus


def device_of(device_name: str) -> torch.device:
    """Return the device that `worker.device` names; with `auto` a GPU if one is leased, or is there without leases."""
    if device_name != "auto":
        return torch.device(device_name)
    uses_gpu = _lease.get("gpus") != 0 and torch.cuda.is_available()
    return torch.device("cuda" if uses_gpu else "cpu")


def free_gpu_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that torch may still reserve: free memory, within the leased part."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    leased_part = min(1.0, _lease.get("gpus", 1.0))
    leased_bytes = int(leased_part * total_bytes)
    return min(free_bytes, leased_bytes - torch.cuda.memory_reserved(device))


def compute_reproducibly(device: torch.device) -> None:
    """Let a GPU make equal bits of equal inputs, as replay mode promises; a CPU does so anyway.

    Only kernels with a fixed order of sums are left, and attention is computed by plain products: each fused kernel
    has a backward pass whose sums race. An operation without such a kernel raises a RuntimeError that names it.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it with its first product.
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)


def take_peak_memory(device: torch.device) -> int | None:
    """Return the most memory that torch has held for tensors on a GPU since it was last asked, in bytes.

    None on a CPU, where the peak of a process is that of its libraries and files, too.
    """
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def use_threads(threads: int) -> None:
    """Let torch compute with this number of threads, and keep memory that a step has freed for the next one.

    Otherwise the C library returns much of it to the system after each step, and requests the same pages again. With
    small models that takes some percent of a step. Blocks of 32 MiB or more, its limit, are still given back.
    """
    torch.set_num_threads(threads)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:  # The C library is glibc.
        set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
        set_option(_MMAP_THRESHOLD, _LARGE_BYTES)


def seed_all(*entropy: int) -> None:
    """Seed all generators that models draw from: those of torch, numpy and Python."""
    sequence = np.random.SeedSequence(entropy)
    seed = int(sequence.generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Sent(Protocol):
    """Point in the order of a device's work, such as an event."""

    def synchronize(self) -> None:
        """Wait until all work before it is done."""
        ...


class Transfers(Protocol):
    """Transfers to a device, which go on beside the host and in the order of their calls."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return memory to send from, as uint8."""
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

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return pinned memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

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
        self._buffer_index = 0
        self._filled_bytes = 0
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
            begin = -(-self._filled_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            fitting_elements = min(elements, (self._size - begin) // dtype.itemsize)
            if fitting_elements <= 0:
                self._advance()
                continue
            self._filled_bytes = begin + fitting_elements * dtype.itemsize
            elements -= fitting_elements
            buffer = self._buffers[self._buffer_index]
            yield buffer[begin : self._filled_bytes].view(dtype)

    def _advance(self) -> None:
        """Go on to the next buffer, and wait until its last transfer has ended."""
        self._sent[self._buffer_index] = self._transfers.mark()
        self._buffer_index = (self._buffer_index + 1) % len(self._buffers)
        self._filled_bytes = 0
        last_transfer = self._sent[self._buffer_index]
        if last_transfer is not None:
            last_transfer.synchronize()


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
