"""Processes that compute a model, and copies through buffers in turns: each arrives whole."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.model import environment
from hypha_ray.model.environment import Staging, device_of, free_gpu_bytes, take_peak_memory, to_device, use_gpus

FREED = """
import ctypes, os
import torch
from hypha_ray.model.environment import use_threads

class Info(ctypes.Structure):  # mallinfo2 of malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                "fsmblks", "uordblks", "fordblks", "keepcost")]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
for set_threads in (torch.set_num_threads, use_threads):
    if os.fork() == 0:
        set_threads(1)
        block = torch.ones(5_000_000)
        del block
        print(info().fordblks, flush=True)
        os._exit(0)
    os.wait()
"""
"""Free bytes that a process holds after 20 MB were freed: where they are given back, and where they are kept."""
CHUNK = 1024


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the option is glibc's")
def test_memory_that_a_step_has_freed_is_kept_for_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], check=True, capture_output=True, text=True)
    given_back, kept = map(int, done.stdout.split())
    assert given_back < 20e6 <= kept


@pytest.fixture
def gpu_in_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine that seems to have a GPU, and a process that has heard of no lease."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "_lease", {})


@pytest.mark.usefixtures("gpu_in_the_machine")
def test_auto_is_the_device_of_the_lease_and_outside_of_leases_that_of_the_machine() -> None:
    assert device_of("auto").type == "cuda"
    for gpus, device in ((0.0, "cpu"), (0.25, "cuda"), (1, "cuda")):
        use_gpus(gpus)
        assert device_of("auto").type == device
    use_gpus(0)
    assert device_of("cpu").type == "cpu"


@pytest.mark.parametrize(("leased", "free", "expected"), [(1, 30, 30), (2, 30, 30), (0.5, 30, 20), (0.5, 15, 15)])
def test_free_memory_of_a_gpu_is_within_the_part_that_is_leased(
    leased: float, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(environment, "_lease", {})
    use_gpus(leased)
    assert free_gpu_bytes(torch.device("cuda")) == expected


REPRODUCIBLE = """
import os
import torch
from hypha_ray.model.environment import compute_reproducibly

for device in ("cuda", "cpu"):
    if os.fork() == 0:
        compute_reproducibly(torch.device(device))
        ways = torch.backends.cuda
        print(torch.are_deterministic_algorithms_enabled(), ways.flash_sdp_enabled(), ways.mem_efficient_sdp_enabled(),
              ways.cudnn_sdp_enabled(), ways.math_sdp_enabled(), "CUBLAS_WORKSPACE_CONFIG" in os.environ, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_replay_on_a_gpu_leaves_only_kernels_whose_sums_have_an_order_and_a_cpu_as_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", REPRODUCIBLE], check=True, capture_output=True, text=True)
    gpu, cpu = (line.split() for line in done.stdout.splitlines())
    assert gpu == ["True", "False", "False", "False", "True", "True"]
    assert cpu[0] == "False"


def test_peak_memory_is_that_since_it_was_last_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"now": 7}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update(now=3))
    assert [take_peak_memory(torch.device("cuda", 0)) for _ in range(2)] == [7, 3]
    assert take_peak_memory(torch.device("cpu")) is None


class Moment:
    """Point in the order of transfers up to which they are done, at the latest when it is waited for."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.synchronize = wait


class Late:
    """Transfers that aren't done before they have to be, as on a GPU that is busy."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.waits = 0
        self.sent_bytes = 0
        self.buffers = 0

    def buffer(self, size: int) -> torch.Tensor:
        self.buffers += 1
        return torch.full((size,), 255, dtype=torch.uint8)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype == target.dtype
        self.sent_bytes += source.nbytes
        self.pending.append((source, target))

    def mark(self) -> Moment:
        count = self.done + len(self.pending)
        return Moment(lambda: self.run(count))

    def run(self, count: int) -> None:
        self.waits += count > self.done
        while self.done < count:
            source, target = self.pending.pop(0)
            target.copy_(source)
            self.done += 1


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=30), st.integers(2, 4))
def test_tensors_of_any_sizes_arrive_as_they_were_when_they_were_copied(
    tensors: list[tuple[int, bool]], buffers: int
) -> None:
    transfers = Late()
    staging = Staging(transfers, CHUNK, buffers)
    expected, targets = [], []
    for number, (size, narrow) in enumerate(tensors):
        source = torch.randn(size, generator=torch.Generator().manual_seed(number))
        target = torch.empty(size, dtype=torch.bfloat16 if narrow else torch.float32)
        staging.copy(source, target)
        expected.append(source.clone().to(target.dtype))
        targets.append(target)
        source.zero_()
    transfers.run(transfers.done + len(transfers.pending))

    assert all(torch.equal(target, values) for target, values in zip(targets, expected, strict=True))
    assert transfers.buffers == buffers
    assert transfers.sent_bytes == sum(target.nbytes for target in targets)


def test_the_host_waits_only_if_all_buffers_are_under_way() -> None:
    transfers = Late()
    staging = Staging(transfers, CHUNK, 3)
    target = torch.empty(6, CHUNK // 4)

    staging.copy(torch.ones(3, CHUNK // 4), target[:3])
    assert transfers.waits == 0 and len(transfers.pending) == 3
    staging.copy(torch.ones(3, CHUNK // 4), target[3:])

    assert transfers.waits == 3 and len(transfers.pending) == 3


def test_small_tensors_share_a_buffer() -> None:
    transfers = Late()
    staging = Staging(transfers, CHUNK, 2)
    for _ in range(4):
        staging.copy(torch.ones(64), torch.empty(64))
    assert transfers.waits == 0 and len(transfers.pending) == 4


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_a_tensor_moves_to_the_cpu_as_it_is(shape: tuple[int, ...]) -> None:
    source = torch.randn(shape)
    assert torch.equal(to_device(source, torch.device("cpu")), source)
