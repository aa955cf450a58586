"""Device, threads, memory and random numbers of a process that computes a model."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of options in ``malloc.h``."""
_KEPT_BYTES, _LARGE_BYTES = 1 << 30, 1 << 25
"""Freed memory that is kept at most, and the size from which a block is always given back."""


def device_of(wish: str) -> torch.device:
    """Return the device that `worker.device` names; with `auto` a GPU if there is one."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wish)


def use_threads(threads: int) -> None:
    """Let torch compute with so many threads, and keep what a step has freed for the next one.

    The C library gives much of it back after each step otherwise, and has to be given the same pages again: with small
    models that takes some percent of a step. Blocks of 32 MiB or more, its limit, are still given back.
    """
    torch.set_num_threads(threads)
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc
        set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
        set_option(_MMAP_THRESHOLD, _LARGE_BYTES)


def seed_all(*entropy: int) -> None:
    """Let all that a model draws depend on these numbers alone from here on: some draw from numpy or Python."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)  # the generator that models use
    random.seed(seed)
