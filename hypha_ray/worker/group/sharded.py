"""Trainers of a worker whose model is sharded over its processes: the first one decides, and all of them compute.

    batch ──┬── part 0 ──► process 0 ─┐  gradient of each shard,  ┌─► clip, step on its shards
            ├── part 1 ──► process 1 ─┼─ summed up in the process ┼─► clip, step on its shards
            └── part 2 ──► process 2 ─┘  that has the shard       └─► clip, step on its shards

Whatever is exchanged or saved is gathered in the first process and has its usual form. All processes have to make the
same collectives, so each runs equally many micro-batches: one that lacks some runs another's once more, which counts
nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hypha_ray.config import Job
from hypha_ray.failpoints import failpoint
from hypha_ray.model.environment import device_of
from hypha_ray.model.evaluation import scored_in_evaluation
from hypha_ray.model.flat import Array, Groups, check
from hypha_ray.model.layout import layout_of
from hypha_ray.model.tasks.task import SpecialTokens
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.optim.step import Step
from hypha_ray.types import Flat, Layout, Samples, Sums, added
from hypha_ray.worker.group.collectives import Collectives, find_store, open_store, parts_of, require_equal
from hypha_ray.worker.group.shards import Shards, SumsOverShards, Told, connect, disconnect, is_broken
from hypha_ray.worker.interrupts import ProcessLostError
from hypha_ray.worker.training.supervised import Backup, SupervisedTrainer, micro_batches

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

    def back_up(self) -> None:
        """Copy gradients and buffers before a batch."""
        self._backup = self._trainer.back_up()

    def undo_batch(self) -> None:
        """Restore gradients and buffers to those before the batch."""
        self._trainer.undo_batch(self._backup)

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


Share = tuple[list[Samples], int]
"""Micro-batches of a process, and the number of the last ones that count nothing."""
LAST_WORDS_S = 10.0
"""Longest wait for the errors of other processes, in seconds, after a collective has failed."""


class Team(Protocol):
    """All processes of a worker but the first, which have a `Follower` each."""

    processes: int
    """Number of processes of the worker, with the first."""

    def same_for_all(self, *arguments: Any) -> list[tuple[Any, ...]]:
        """Return the same arguments for each of them."""

    def call(self, name: str, each: Sequence[tuple[Any, ...]]) -> None:
        """Call a method of all followers, each with arguments of its own, once earlier calls are done."""

    def replies(self, limit_s: float | None = None) -> list[Any]:
        """Wait for the results of the latest call; raises the error of a process rather than that it has died."""

    def close(self) -> None:
        """End all of them."""


class ShardedTrainer(SupervisedTrainer):
    """Trainer in the first process of a worker whose model is sharded.

    Args:
        job: the job file.
        specials: special tokens, as `SupervisedTrainer` takes them.
        team: the other processes.

    Raises:
        ConfigError: MODEL022, the processes' models differ.

    """

    def __init__(self, job: Job, specials: SpecialTokens | None, team: Team) -> None:
        self._team, self._orders = team, list[Order]()
        """Orders that are sent with the next one whose result matters."""
        try:
            store, port = open_store()
            device = device_of(job.worker.device)
            limit_s = job.worker.stall_s
            team.call("begin", team.same_for_all())
            team.call("build", team.same_for_all(port))
            super().__init__(job, specials, connect(store, 0, team.processes, device, limit_s))
            built = layout_of(self.model, job.sync.fragments, job.sync.partition).sha256()
            require_equal(built, team.replies())
            team.call("join", team.same_for_all())
            self.join(SumsOverShards(Collectives(store, 0, team.processes, device, limit_s)))
            self.optimizer = Leading(self.optimizer, job, self._order)
        except BaseException:
            self.close()
            raise

    def seed(self, *entropy: int) -> None:
        """Let random numbers depend on these alone; each process has its own."""
        super().seed(*entropy)
        self._order("seed", entropy)

    def add_gradient(self, batch: Samples, summed: bool) -> Step:
        """Add the gradient of a batch, of which each process computes that of its part."""
        shares = self._shares(batch, self._accumulation, self.count)
        if shares is None:
            return Step(torch.zeros((), device=self.device), 0, torch.zeros((), device=self.device))
        (own, idle), *others = shares
        with self._together("add_parts", [(*share, summed) for share in others]):
            return self.add_parts(own, summed, idle)

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """Return the model's loss, and what it got right, as sums over the parts of all processes."""
        found: list[Sums] = []
        for batch in batches:
            if (shares := self._shares(batch, 1, self._scored)) is None:
                continue
            (own, idle), *others = shares
            with self._together("evaluate", others):
                sums = super().evaluate(own)
                found += [one for one in [None if idle else sums, *self._team.replies()] if one is not None]
        return added(found) if found else super().evaluate([])

    def gather(self, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False) -> Flat:
        """Copy a fragment of weights or gradients out of all shards."""
        assert self.shards is not None
        if out is not None:
            check(layout, fragment, out)
        with self._together("gather", self._team.same_for_all(fragment, gradients)):
            return self.shards.gather(layout, fragment, out, gradients)

    def scatter(self, layout: Layout, fragment: int, flat: Groups, mixing: float = 0.0) -> None:
        """Copy a fragment's arrays into all shards."""
        assert self.shards is not None
        check(layout, fragment, flat)
        with self._together("scatter", self._team.same_for_all(fragment, mixing)):
            self.shards.scatter(layout, fragment, flat, mixing)

    def optimizer_state(self) -> Flat:
        """Copy the state of all shards, in the form that it has in one process."""
        assert self.shards is not None
        with self._together("export_state", self._team.same_for_all()):
            return self.shards.export_state(self.optimizer)

    def load_optimizer_state(self, state: Mapping[str, Array]) -> None:
        """Go on from what `optimizer_state` gave."""
        assert self.shards is not None
        self.shards.require_fit(self.optimizer, state)
        told = self.shards.told(state)
        with self._together("load_state", self._team.same_for_all(told)):
            self.shards.load_state(self.optimizer, told, state)

    def close(self) -> None:
        """End the other processes."""
        self._team.close()
        disconnect()

    def back_up(self) -> Backup:
        """Copy gradients and buffers, here and in the others."""
        self._order("back_up")
        return super().back_up()

    def undo_batch(self, backup: Backup) -> None:
        """Undo a batch, here and in the others."""
        self._order("undo_batch")
        super().undo_batch(backup)

    def _shares(self, batch: Samples, pieces: int, count: Callable[[Samples], int]) -> list[Share] | None:
        """Cut a batch into micro-batches of each process, equally many; None if nothing in it is scored."""
        parts = parts_of(batch, self._team.processes)
        scored = [[one for one in micro_batches(part, pieces) if count(one)] for part in parts]
        most = max(map(len, scored))
        if not most:
            return None
        filler = min((one for own in scored for one in own), key=len)
        return [([*own, *[filler] * (most - len(own))], most - len(own)) for own in scored]

    def _scored(self, part: Samples) -> int:
        return scored_in_evaluation(self._task, part)

    def _order(self, name: str, *arguments: Any, now: bool = False) -> None:
        """Give an order to all others, which they carry out before the next one that is sent; or send it at once."""
        self._orders.append((name, *arguments))
        if now:
            orders = self._orders
            self._orders = []
            self._team.call("perform", self._team.same_for_all(orders))

    @contextmanager
    def _together(self, name: str, each: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """Context in which others carry out an order, each with its own arguments, and this process its part.

        Raises:
            ProcessLostError: one of them has died or is silent.
            HyphaError: whatever one of them raises.

        """
        orders = self._orders
        self._orders = []
        self._team.call("perform", [([*orders, (name, *own)],) for own in each])
        try:
            yield
        except Exception as error:
            raise self._reason(error) from error

    def _reason(self, error: Exception) -> Exception:
        """Return the error that was the reason for one here: another process may have broken before."""
        try:
            self._team.replies(LAST_WORDS_S)
        except ProcessLostError as lost:
            return lost if is_broken(error) else error
        except Exception as reason:
            return reason
        return ProcessLostError(str(error)) if is_broken(error) else error


class Leading(Inner):
    """Optimizer of the first process's shards, which tells the others of each of its steps.

    Args:
        inner: optimizer of the shards.
        job: the job file.
        order: gives an order to the others.

    """

    def __init__(self, inner: Inner, job: Job, order: Callable[..., None]) -> None:
        super().__init__(inner.optimizers, job.inner_optimizer, inner_steps(job))
        self._order = order

    def zero_grad(self) -> None:
        """Forget the gradients, everywhere."""
        self._order("zero_grad")
        super().zero_grad()

    def reset(self) -> None:
        """Forget all state, everywhere."""
        self._order("reset")
        super().reset()

    def step(self, norm: Tensor | None = None, skipped: Tensor | None = None) -> None:
        """Take a step in all processes, by the norm of the whole gradient."""
        self._order("step", self.rates, now=True)
        super().step(norm, skipped)
