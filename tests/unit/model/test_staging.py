"""Copies through buffers in turns: what arrives late arrives whole, and no buffer is filled before it is free."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.model.environment import Staging, to_device

CHUNK = 1024


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
