"""Device, threads, memory and random numbers of a process that computes a model."""

from __future__ import annotations

import ctypes
import os
import random

import numpy as np
import torch

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Names of options in ``malloc.h``."""
_KEPT_BYTES = 1 << 30
_LARGE_BYTES = 1 << 25
"""Largest amount of freed memory that is kept, and the size from which a block is always given back."""
_lease: dict[str, float] = {}
"""Number of GPUs in this process's lease, under `gpus`; empty without a lease, when the machine decides."""


def use_gpus(leased: float) -> None:
    """Let `device_of` choose by the GPUs that this process has leased.

    Ray hides no GPU from a process that has leased none: it would use one that others pay for.
    """
    _lease["gpus"] = leased


def device_of(wish: str) -> torch.device:
    """Return the device that `worker.device` names; with `auto` a GPU if one is leased, or is there without leases."""
    if wish != "auto":
        return torch.device(wish)
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
