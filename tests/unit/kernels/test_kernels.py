"""Compiled kernels: copies past the caches, and an outer step that writes into no memory but its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hypha_ray.kernels import LEAST, compiled, copy

NEIGHBOUR = """
import sys, threading
import numpy as np, torch
from hypha_ray.kernels import Averaged, nesterov, portions

WORKERS, SIZE = int(sys.argv[1]), 1 << 20
theta, velocity, new = (torch.zeros(SIZE) for _ in range(3))
shares = [1 / count for count in range(1, WORKERS + 1)]
block = Averaged([torch.ones(SIZE)] * WORKERS, portions(shares), theta, velocity, new, None)
nesterov(0.7, 0.9, block)
over = threading.Event()
wrong_norms = 0

def steps():
    global wrong_norms
    for _ in range(150):
        wrong_norms += nesterov(0.7, 0.9, block)[:WORKERS] != [float(SIZE)] * WORKERS
    over.set()

thread = threading.Thread(target=steps)
thread.start()
damaged = 0
while not over.is_set():
    arrays = [np.full((WORKERS + 1 + extra % 4) * 16, 7, np.float32) for extra in range(64)]
    over.wait(1e-4)
    damaged += sum(not np.all(array == 7) for array in arrays)
thread.join()
print(damaged, wrong_norms)
"""
"""Allocates arrays of the size of the step's scratch, all from the heap that the step's thread has too."""


@pytest.mark.parametrize("size", [1, 5, 15, 16, 17, 100, 4096, (1 << 18) + 13])
@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("there", [0, 3, 15])
def test_copies_between_any_addresses_and_touches_nothing_beside(
    size: int, start: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEAST, "copy", 1)
    source, out = torch.randn(size + start)[start:], torch.full((there + size + 3,), 7.0)
    copy(source, out[there : there + size])
    assert torch.equal(out[there : there + size], source)
    assert (out[:there] == 7).all() and (out[there + size :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_no_plain_copy_is_left_to_torch(dtype: torch.dtype) -> None:
    source, out = torch.randn(600, 600), torch.zeros(600, 600, dtype=dtype)
    copy(source.t(), out)
    assert torch.equal(out, source.t().to(dtype))


def test_can_be_compiled_here() -> None:
    assert compiled("copy") is not None and compiled("outer") is not None and compiled("nothing") is None
    assert compiled("patches") is not None


@pytest.mark.slow
def test_step_damages_no_memory_of_other_threads() -> None:
    assert compiled("outer") is not None
    one_heap = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    for workers in ("2", "4"):
        command = [sys.executable, "-c", NEIGHBOUR, workers]
        ended = subprocess.run(command, env=os.environ | one_heap, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0 0\n", "")
