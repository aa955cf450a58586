"""Trainer of a worker of several processes: each computes its part of a batch's gradient, and this one does the rest.

    batch ──┬── part 0 ──► gradient ─┐
            ├── part 1 ──► gradient ─┼─ sum ──► clip, optimizer step ──► new weights to all processes
            └── part 2 ──► gradient ─┘

Weights, the optimizer's state and everything that is exchanged or saved are in the first process. So codecs,
fragments, strategies and replay work as in a worker of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hypha_ray.config import Job
from hypha_ray.model.layout import layout_of
from hypha_ray.model.tasks.task import SpecialTokens
from hypha_ray.optim.step import PendingStep, Step
from hypha_ray.types import Samples, Sums, added
from hypha_ray.worker.group.actor import Members, ShardedMember
from hypha_ray.worker.group.collectives import Collectives, open_store, require_equal, split_batch
from hypha_ray.worker.interrupts import ProcessLostError
from hypha_ray.worker.training.supervised import SupervisedTrainer

if TYPE_CHECKING:
    from hypha_ray.worker.group.sharded import Team


class GroupTrainer(SupervisedTrainer):
    """Trainer in the first process of a worker.

    Args:
        job: the job file.
        specials: special tokens, as `SupervisedTrainer` takes them.
        members: the other processes.

    """

    def __init__(self, job: Job, specials: SpecialTokens | None, members: Team) -> None:
        self._members = members
        self._has_stale_members = True
        """Whether other processes may have other weights than this one."""
        try:
            self._members.call("build", self._members.same_for_all())
            super().__init__(job, specials)
            self._collectives = self._connect(job)
            self.join(self._collectives)
        except BaseException:
            members.close()
            raise

    def step(self, batch: Samples) -> Step:
        """Take one inner step on the gradient of all parts."""
        result = super().step(batch)
        self._has_stale_members = True
        return result

    def begin_step(self, batch: Samples) -> PendingStep:
        """Begin one inner step on the gradient of all parts."""
        pending = super().begin_step(batch)
        self._has_stale_members = True
        return pending

    def step_without_damage(self, batch: Samples, rates: Sequence[Sequence[float]]) -> Step:
        """Take a step on the undamaged samples of a batch, in all processes."""
        result = super().step_without_damage(batch, rates)
        self._has_stale_members = True
        return result

    def update_scale(self, figures: Tensor) -> None:
        """Change the scale of losses, in all processes."""
        super().update_scale(figures)
        self._has_stale_members = True

    def find_damaged(self, batch: Samples) -> npt.NDArray[np.bool_]:
        """Return which samples have no finite gradient by themselves; no process scales its losses meanwhile."""
        self._has_stale_members = True
        try:
            return super().find_damaged(batch)
        finally:
            self._has_stale_members = True

    def add_gradient(self, batch: Samples, summed: bool) -> Step:
        """Add the gradient of a batch; each process computes it for its part."""
        first_part, *other_parts = split_batch(batch, self._members.processes)
        with self._together("add_gradient", other_parts, summed):
            return super().add_gradient(first_part, summed)

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """Return sums of the model's loss and metrics over the parts of all processes."""
        member_sums: list[Sums] = []
        self._has_stale_members = True  # The global weights may be in the model for this evaluation alone.
        first_sums = super().evaluate(self._first_parts(batches, member_sums))
        self._has_stale_members = True
        return added([first_sums, *member_sums])

    def seed(self, *entropy: int) -> None:
        """Let random numbers depend on these alone; each process has its own."""
        super().seed(*entropy)
        self._members.call("seed", self._members.same_for_all(entropy))

    def merged(self, version: int) -> None:
        """Mark the weights of other processes as stale, so that they get the merged ones."""
        self._has_stale_members = True

    def close(self) -> None:
        """End the other processes."""
        self._members.close()
        self._collectives.close()

    def _connect(self, job: Job) -> Collectives:
        """Connect all processes once they have built their models.

        Raises:
            ConfigError: MODEL022, their models differ.

        """
        built = layout_of(self.model).sha256()
        require_equal(built, self._members.replies())
        store, port = open_store()
        self._members.call("join", self._members.same_for_all(port))
        return Collectives(store, 0, self._members.processes, self.device, job.worker.stall_s)

    def _first_parts(self, batches: Iterable[Samples], member_sums: list[Sums]) -> Iterator[Samples]:
        """Yield the first part of each batch, while others evaluate theirs; their sums go to `member_sums`."""
        for batch in batches:
            first_part, *other_parts = split_batch(batch, self._members.processes)
            with self._together("evaluate", other_parts):
                yield first_part
            member_sums += self._members.replies()

    @contextmanager
    def _together(self, name: str, parts: list[Samples], *arguments: Any) -> Iterator[None]:
        """Context in which other processes work on their parts, with the weights of this one.

        Raises:
            ProcessLostError: one of them has died or is silent.
            HyphaError: whatever one of them raises.

        """
        has_stale_weights = self._has_stale_members
        self._has_stale_members = False
        self._members.call(name, [(part, has_stale_weights, *arguments) for part in parts])
        try:
            if has_stale_weights:
                self._collectives.copy_out(self.tensors)
            yield
        except ProcessLostError:
            self._collectives.close()
            self._members.replies()  # It raises the error of a process, if that was the cause.
            raise


def group_trainer(job: Job, specials: SpecialTokens | None, worker: int) -> SupervisedTrainer:
    """Build the trainer of a worker of several processes, in its first one.

    Args:
        job: the job file.
        specials: special tokens, as `SupervisedTrainer` takes them.
        worker: number of the worker.

    Raises:
        HyphaError: the model can't be built, or not equally in all processes.

    """
    if job.worker.sharding == "none":
        return GroupTrainer(job, specials, Members(job, specials, worker))
    from hypha_ray.worker.group.sharded import ShardedTrainer

    return ShardedTrainer(job, specials, Members(job, specials, worker, ShardedMember))
