"""Connections of processes that share a model's shards: torch's default group, as FSDP2 wants it, and sums over it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Backend, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from hypha_ray.optim.optimizers import Inner
from hypha_ray.worker.group.collectives import Collectives, gloo
from hypha_ray.worker.interrupts import ProcessLostError

_LOOPBACK = "loopback"
"""Backend that is gloo on the loopback interface: torch's own listens where the host's name leads."""


def connect(store: Store, rank: int, size: int, device: torch.device, deadline_s: float) -> DeviceMesh:
    """Connect this process to all others of its worker; it has one such group at a time.

    Args:
        store: store of `open_store` or `find_store`.
        rank: number of this process.
        size: number of processes.
        device: device of the shards.
        deadline_s: longest wait for the other processes.

    """
    if _LOOPBACK not in Backend.backend_list:
        Backend.register_backend(_LOOPBACK, _made, extended_api=True, devices=["cpu"])
    backend = "nccl" if device.type == "cuda" else _LOOPBACK
    limit = timedelta(seconds=deadline_s)
    dist.init_process_group(backend, store=PrefixStore("shards", store), rank=rank, world_size=size, timeout=limit)
    group: Any = dist.group.WORLD
    return DeviceMesh.from_group(group, device.type)


def disconnect() -> None:
    """Leave the group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_broken(error: Exception) -> bool:
    """Whether an error says no more than that another process is gone or silent."""
    return isinstance(error, ProcessLostError | dist.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


class SumsOverShards:
    """Sums over all processes of a worker whose model is sharded; FSDP2 has already summed up the gradients.

    Args:
        collectives: counts over gloo, by which a dead process is noticed on GPUs, too.

    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def total(self, count: int) -> int:
        """Return the sum of a number that each process has."""
        return self._collectives.total(count)

    def add_up(self, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Replace the loss by its sum, in all processes."""
        dist.all_reduce(loss)

    def norm(self, optimizer: Inner) -> Tensor:
        """Return the norm of the gradients of all shards, in all processes."""
        squared = optimizer.norm().square()
        dist.all_reduce(squared)
        return squared.sqrt()


def _made(options: Any, _: Any) -> Any:
    return gloo(options.store, options.group_rank, options.group_size, options.timeout)
