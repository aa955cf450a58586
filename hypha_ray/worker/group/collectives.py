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
from hypha_ray.worker.incarnation import ProcessLostError

_HOST = "127.0.0.1"
_BUCKET_BYTES = 32 << 20
"""Most bytes of small tensors that go together."""


def split_batch(batch: Samples, count: int) -> list[Samples]:
    """Split a batch into `count` parts; the first ones may be larger by a sample, and the last ones empty."""
    part_samples, larger_parts = divmod(len(batch), count)
    bounds = [number * part_samples + min(number, larger_parts) for number in range(count + 1)]
    return [batch.part(slice(start, stop)) for start, stop in pairwise(bounds)]


def require_equal(fingerprint: str, fingerprints: Iterable[str]) -> None:
    """Refuse processes whose models have other fingerprints than this one's.

    Raises:
        ConfigError: MODEL022.

    """
    if set(fingerprints) - {fingerprint}:
        problem = "the processes of a worker have built different models from the same job file"
        raise ConfigError("MODEL022", problem, fix="name a model whose weights don't change, by model.revision")


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
        with _raising_process_lost():
            self._counts: Any = loopback_gloo(PrefixStore("counts", store), rank, size, limit)
            self._tensors: Any = self._counts
            if device.type == "cuda":
                self._tensors = _nccl(store, rank, size, limit)

    def total(self, count: int) -> int:
        """Return the sum of a number that each process has."""
        total = torch.tensor([count], dtype=torch.int64)
        with _raising_process_lost():
            self._counts.allreduce([total]).wait()
        return int(total)

    def add_up(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Sum gradients and loss in process 0; a parameter has no gradient if it has none in any process."""
        gradient_counts = torch.tensor([weights.grad is not None for weights in parameters], dtype=torch.int64)
        with _raising_process_lost():
            self._counts.allreduce([gradient_counts]).wait()
        sums: list[Tensor] = []
        for weights, gradient_count in zip(parameters, gradient_counts.tolist(), strict=True):
            if not gradient_count:
                continue
            if weights.grad is None:
                weights.grad = torch.zeros_like(weights)
            sums.append(weights.grad)
        sums.append(loss)
        self._run_in_buckets(sums, lambda flat: self._tensors.reduce(flat, root=0), self._rank == 0)

    def norm(self, optimizer: Inner) -> Tensor:
        """Return the norm of the gradients in process 0, and 0 in others, which don't use it."""
        if self._rank == 0:
            return optimizer.norm()
        return torch.zeros((), device=self._device)

    def copy_out(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of process 0 to the others."""
        numbers: list[Tensor] = []
        for tensor in tensors:
            is_bool = tensor.dtype == torch.bool  # Backends don't know it.
            numbers.append(tensor.view(torch.uint8) if is_bool else tensor)
        self._run_in_buckets(numbers, lambda flat: self._tensors.broadcast(flat, root=0), self._rank > 0)

    def close(self) -> None:
        """End all connections, so that other processes don't wait for this one."""
        self._counts = self._tensors = None

    @torch.no_grad()
    def _run_in_buckets(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], Any], receives: bool) -> None:
        """Run a collective on all tensors, small ones together; copy the result back if this process receives it."""
        for bucket in _buckets(tensors):
            is_flat = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0].view(-1) if is_flat else torch.cat([tensor.reshape(-1) for tensor in bucket])
            with _raising_process_lost():
                collective(flat).wait()
            if not receives or is_flat:
                continue
            start = 0
            for tensor in bucket:
                stop = start + tensor.numel()
                tensor.copy_(flat[start:stop].view_as(tensor))
                start = stop


def open_store() -> tuple[TCPStore, int]:
    """Open the store of a worker's processes; return it and its port."""
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


def find_store(port: int, deadline_s: float) -> TCPStore:
    """Connect to the store that process 0 has opened."""
    return TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=deadline_s))


@contextmanager
def _raising_process_lost() -> Iterator[None]:
    """Context in which an error of torch counts as the loss of another process."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLostError(f"a process of this worker has died or is silent: {error}") from None


def loopback_gloo(store: Store, rank: int, size: int, limit: timedelta) -> ProcessGroupGloo:
    """Make a group of gloo that listens on the loopback interface alone."""
    group_class: Any = ProcessGroupGloo
    options = group_class._Options()
    options._devices = [group_class.create_device(hostname=_HOST)]
    options._timeout = limit
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(PrefixStore("tensors", store), rank, size, options)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors into lists of one dtype, each small enough to be copied together."""
    bucket: list[Tensor] = []
    free_bytes = 0
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        if bucket and (tensor.dtype != bucket[0].dtype or tensor.nbytes > free_bytes):
            yield bucket
            bucket = []
        if not bucket:
            free_bytes = _BUCKET_BYTES
        bucket.append(tensor)
        free_bytes -= tensor.nbytes
    if bucket:
        yield bucket
