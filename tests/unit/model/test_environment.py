"""Processes that compute a model."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

FREED = """
import ctypes, sys
import torch
from hypha_ray.model.environment import use_threads

class Info(ctypes.Structure):  # mallinfo2 of malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                "fsmblks", "uordblks", "fordblks", "keepcost")]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
use_threads(1) if sys.argv[1] == "kept" else torch.set_num_threads(1)
block = torch.ones(5_000_000)
del block
print(info().fordblks)
"""
"""Free bytes that the process holds after 20 MB were freed."""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the option is glibc's")
def test_memory_that_a_step_has_freed_is_kept_for_the_next_one() -> None:
    def held(way: str) -> int:
        return int(
            subprocess.run([sys.executable, "-c", FREED, way], check=True, capture_output=True, text=True).stdout
        )

    assert held("given back") < 20e6 <= held("kept")
