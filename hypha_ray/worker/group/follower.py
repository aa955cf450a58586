"""Process of a sharded worker but the first: it does what that one orders, so that both make the same collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from hypha_ray.config import Job
from hypha_ray.failpoints import failpoint
from hypha_ray.model.environment import device_of
from hypha_ray.model.layout import layout_of
from hypha_ray.model.tasks.masking import SpecialTokens
from hypha_ray.types import Samples, Sums
from hypha_ray.worker.group.collectives import Collectives, find_store
from hypha_ray.worker.group.mesh import SumsOverShards, connect
from hypha_ray.worker.group.shards import Shards, Told
from hypha_ray.worker.training.supervised import SupervisedTrainer

Order: TypeAlias = tuple[Any, ...]
"""Name of a method of `Follower`, and its arguments."""


class Follower:
    """Trainer of a process that has shards, and no part in any decision.

    Args:
        job: the job file.
        specials: special tokens, as `SupervisedTrainer` takes them.
        worker: number of the worker.
        rank: number of the process in its worker, from 1.

    """

    def __init__(self, job: Job, specials: SpecialTokens | None, worker: int, rank: int) -> None:
        self._job = job
        self._specials = specials
        self._worker = worker
        self._rank = rank
        self._norm: Tensor | None = None
        """Norm of the latest gradients."""

    def build(self, port: int) -> str:
        """Connect to the other processes, whose store has this port, and build the model; return its fingerprint."""
        job = self._job
        limit_s = self._job.worker.stall_s
        store = find_store(port, limit_s)
        size = job.processes_of(self._worker)
        device = device_of(job.worker.device)
        mesh = connect(store, self._rank, size, device, limit_s)
        self._trainer = SupervisedTrainer(job, self._specials, mesh)
        self._sums_of = partial(Collectives, store, self._rank, size, device, limit_s)
        self._layout = layout_of(self._trainer.model, job.sync.fragments, job.sync.partition)
        return self._layout.sha256()

    def join(self) -> None:
        """Take part in sums from here on, once all processes have built the model."""
        self._trainer.join(SumsOverShards(self._sums_of()))

    def perform(self, orders: Sequence[Order]) -> Any:
        """Carry out orders one after the other; return the result of the last one."""
        found = None
        for name, *arguments in orders:
            found = getattr(self, name)(*arguments)
        return found

    def seed(self, entropy: tuple[int, ...]) -> None:
        """Let random numbers depend on these, and on the number of this process."""
        self._trainer.seed(*entropy, self._rank)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._trainer.optimizer.zero_grad()

    def keep(self) -> None:
        """Keep the gradients and buffers that are there."""
        self._kept = self._trainer.kept()

    def put_back(self) -> None:
        """Go back to the gradients and buffers that were kept."""
        self._trainer.put_back(self._kept)

    def add_parts(self, parts: Sequence[Samples], idle: int, summed: bool) -> None:
        """Add the gradient of this process's micro-batches."""
        failpoint("worker.process", self._worker)
        self._norm = self._trainer.add_parts([_copied(part) for part in parts], summed, idle).norm

    def step(self, rates: Sequence[Sequence[float]]) -> None:
        """Take a step with these learning rates, one for each group of parameters of each optimizer."""
        self._trainer.optimizer.set_rates(rates)
        self._trainer.optimizer.step(self._norm)

    def reset(self) -> None:
        """Forget the optimizer's state."""
        self._trainer.optimizer.reset()

    def evaluate(self, parts: Sequence[Samples], idle: int) -> Sums | None:
        """Return figures of samples; None if they don't count here."""
        sums = self._trainer.evaluate([_copied(part) for part in parts])
        return None if idle else sums

    def gather(self, fragment: int, gradients: bool) -> None:
        """Have a part in the copy of a fragment out of the model."""
        self._shards.gather(self._layout, fragment, gradients=gradients)

    def scatter(self, fragment: int, mixing: float) -> None:
        """Receive this process's part of a fragment."""
        self._shards.scatter(self._layout, fragment, mixing=mixing)

    def export_state(self) -> None:
        """Have a part in the copy of the optimizer's state."""
        self._shards.export_state(self._trainer.optimizer)

    def load_state(self, told: Mapping[str, Told]) -> None:
        """Receive this process's part of an optimizer's state."""
        self._shards.load_state(self._trainer.optimizer, told)

    @property
    def _shards(self) -> Shards:
        assert self._trainer.shards is not None
        return self._trainer.shards


def _copied(part: Samples) -> Samples:
    """Copy samples, because arrays of other processes are read-only, of which torch makes no tensors."""
    return Samples({name: np.array(array) for name, array in part.arrays.items()}, part.keys)
