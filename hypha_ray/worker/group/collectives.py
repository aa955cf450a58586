"""Collectives between the processes of a worker: counts over gloo, tensors over NCCL if they are on GPUs.

All processes are on one node, so store and gloo listen on its loopback interface alone. Everything has a deadline.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from hypha_ray.errors import ConfigError
from hypha_ray.optim.optimizers import Inner
from hypha_ray.types import Samples
from hypha_ray.worker.interrupts import ProcessLostError


def parts_of(batch: Samples, count: int) -> list[Samples]:
    """Cut a batch into that many parts, of which the first ones may be larger by a sample, and the last ones empty."""
    whole, rest = divmod(len(batch), count)
    ends = [number * whole + min(number, rest) for number in range(count + 1)]
    return [batch.part(slice(start, stop)) for start, stop in pairwise(ends)]


def require_equal(built: str, others: Iterable[str]) -> None:
    """Refuse processes whose models have other fingerprints than this one's.

    Raises:
        ConfigError: MODEL022.

    """
    if any(other != built for other in others):
        what = "the processes of a worker have built different models from the same job file"
        raise ConfigError("MODEL022", what, fix="name a model whose weights don't change, by model.revision")


_HOST = "127.0.0.1"
_BUCKET_BYTES = 32 << 20
"""Most bytes of small tensors that go together."""


class Collectives:
    """Sums and copies over all processes of a worker; each of them calls the same methods in the same order.

    Args:
        store: store of `open_store` or `find_store`.
        rank: number of this process; process 0 gets the sums, and the others its tensors.
        size: number of processes.
        device: device of the tensors.
        deadline_s: longest wait for the other processes.

    Raises:
        ProcessLostError: another process hasn't come within the deadline. All methods raise it, also if one has died.

    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, deadline_s: float) -> None:
        self._rank = rank
        self._device = device
        limit = timedelta(seconds=deadline_s)
        with _told():
            self._counts: Any = gloo(PrefixStore("counts", store), rank, size, limit)
            self._tensors: Any = _nccl(store, rank, size, limit) if device.type == "cuda" else self._counts

    def total(self, count: int) -> int:
        """Return the sum of a number that each process has."""
        found = torch.tensor([count], dtype=torch.int64)
        with _told():
            self._counts.allreduce([found]).wait()
        return int(found)

    def add_up(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Sum gradients and loss up in process 0; a parameter has no gradient if it has none in any process."""
        there = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int64)
        with _told():
            self._counts.allreduce([there]).wait()
        used = [one for one, processes in zip(parameters, there.tolist(), strict=True) if processes]
        for one in used:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        gradients = [one.grad for one in used if one.grad is not None]
        self._each([*gradients, loss], lambda flat: self._tensors.reduce(flat, root=0), self._rank == 0)

    def norm(self, optimizer: Inner) -> Tensor:
        """Return the norm of the gradients in process 0; others have no use for theirs."""
        return optimizer.norm() if self._rank == 0 else torch.zeros((), device=self._device)

    def copy_out(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of process 0 to the others."""
        plain = [one.view(torch.uint8) if one.dtype == torch.bool else one for one in tensors]
        self._each(plain, lambda flat: self._tensors.broadcast(flat, root=0), self._rank > 0)

    def close(self) -> None:
        """End all connections, by which other processes learn that this one takes no part any more."""
        self._counts = self._tensors = None

    @torch.no_grad()
    def _each(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], Any], takes: bool) -> None:
        """Make a collective of all tensors, small ones together, and take over its result if that is wanted."""
        for bucket in _buckets(tensors):
            direct = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0].view(-1) if direct else torch.cat([one.reshape(-1) for one in bucket])
            with _told():
                collective(flat).wait()
            if takes and not direct:
                for one, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                    one.copy_(part.view_as(one))


def open_store() -> tuple[TCPStore, int]:
    """Open the store of a worker's processes; return it and its port."""
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


def find_store(port: int, deadline_s: float) -> TCPStore:
    """Connect to the store that process 0 has opened."""
    return TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=deadline_s))


@contextmanager
def _told() -> Iterator[None]:
    """Context in which an error of torch means that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLostError(f"a process of this worker has died or is silent: {error}") from None


def gloo(store: Store, rank: int, size: int, limit: timedelta) -> ProcessGroupGloo:
    """Make a group of gloo that listens on the loopback interface alone."""
    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=_HOST)]
    options._timeout = limit
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(PrefixStore("tensors", store), rank, size, options)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut tensors into lists of one dtype that are small enough to be copied together."""
    bucket: list[Tensor] = []
    room = 0
    for one in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        size = one.numel() * one.element_size()
        if bucket and (one.dtype != bucket[0].dtype or size > room):
            yield bucket
            bucket = []
        if not bucket:
            room = _BUCKET_BYTES
        bucket.append(one)
        room -= size
    if bucket:
        yield bucket
