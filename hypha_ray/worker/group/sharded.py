"""Trainers of a worker whose model is sharded over its processes: the first one decides, and all of them compute.

    batch ──┬── part 0 ──► process 0 ─┐  gradient of each shard,  ┌─► clip, step on its shards
            ├── part 1 ──► process 1 ─┼─ summed up in the process ┼─► clip, step on its shards
            └── part 2 ──► process 2 ─┘  that has the shard       └─► clip, step on its shards

Whatever is exchanged or saved is gathered in the first process and has its usual form. All processes have to run the
same collectives, so each runs equally many micro-batches. A process that lacks some runs another's once more, with no
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hypha_ray.config import Job
from hypha_ray.failpoints import failpoint
from hypha_ray.model.environment import device_of
from hypha_ray.model.flat import Array, Groups, check
from hypha_ray.model.layout import layout_of
from hypha_ray.model.metrics import scored_in_evaluation
from hypha_ray.model.task import SpecialTokens
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.optim.step import Step
from hypha_ray.types import Flat, Layout, Samples, Sums, added
from hypha_ray.worker.group.collectives import Collectives, find_store, open_store, require_equal, split_batch
from hypha_ray.worker.group.shards import Shards, SharedState, SumsOverShards, connect, disconnect, is_broken
from hypha_ray.worker.incarnation import ProcessLostError
from hypha_ray.worker.supervised import Backup, SupervisedTrainer, micro_batches

Call: TypeAlias = tuple[Any, ...]
"""Name of a method of `Follower`, and its arguments."""
Share = tuple[list[Samples], int]
"""Micro-batches of a process, and the number of the last ones that have no weight."""
ERROR_WAIT_S = 10.0
"""Longest wait for the errors of other processes, in seconds, after a collective has failed."""


class Follower:
    """Trainer of a process that has shards; it only carries out the calls of the first process.

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
        processes = job.processes_of(self._worker)
        device = device_of(job.worker.device)
        mesh = connect(store, self._rank, processes, device, limit_s)
        self._trainer = SupervisedTrainer(job, self._specials, mesh)
        self._sums_of = partial(Collectives, store, self._rank, processes, device, limit_s)
        self._layout = layout_of(self._trainer.model, job.sync.fragments, job.sync.partition)
        return self._layout.sha256()

    def join(self) -> None:
        """Take part in sums from here on, once all processes have built the model."""
        self._trainer.join(SumsOverShards(self._sums_of()))

    def perform(self, calls: Sequence[Call]) -> Any:
        """Carry out calls one after the other; return the result of the last one."""
        result = None
        for name, *arguments in calls:
            method = getattr(self, name)
            result = method(*arguments)
        return result

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

    def add_parts(self, parts: Sequence[Samples], idle_count: int, summed: bool, scale: float | None) -> None:
        """Add the gradient of this process's micro-batches; `scale` is that of the losses, None if there is none."""
        failpoint("worker.process", self._worker)
        if scale is not None:
            assert self._trainer.loss_scale is not None
            self._trainer.loss_scale.scale.fill_(scale)
        copies = [_copied(part) for part in parts]
        step = self._trainer.add_parts(copies, summed, idle_count)
        self._norm = step.norm

    def step(self, rates: Sequence[Sequence[float]]) -> None:
        """Take a step with these learning rates, one for each group of parameters of each optimizer."""
        self._trainer.optimizer.set_rates(rates)
        self._trainer.optimizer.step(self._norm)

    def reset(self) -> None:
        """Forget the optimizer's state."""
        self._trainer.optimizer.reset()

    def evaluate(self, parts: Sequence[Samples], idle_count: int) -> Sums | None:
        """Evaluate samples; return the sums of their figures, None if they have no weight here."""
        sums = self._trainer.evaluate([_copied(part) for part in parts])
        if idle_count:
            return None
        return sums

    def gather(self, fragment: int, gradients: bool) -> None:
        """Take part in copying a fragment out of the model."""
        self._shards.gather(self._layout, fragment, gradients=gradients)

    def scatter(self, fragment: int, mixing: float) -> None:
        """Receive this process's part of a fragment."""
        self._shards.scatter(self._layout, fragment, mixing=mixing)

    def export_state(self) -> None:
        """Take part in copying the optimizer's state."""
        self._shards.export_state(self._trainer.optimizer)

    def load_state(self, shared_states: Mapping[str, SharedState]) -> None:
        """Receive this process's part of an optimizer's state."""
        self._shards.load_state(self._trainer.optimizer, shared_states)

    @property
    def _shards(self) -> Shards:
        assert self._trainer.shards is not None
        return self._trainer.shards


def _copied(part: Samples) -> Samples:
    """Copy samples, because torch makes no tensors of read-only arrays, such as those of other processes."""
    arrays = {name: np.array(array) for name, array in part.arrays.items()}
    return Samples(arrays, part.keys)


class Team(Protocol):
    """All processes of a worker but the first, which have a `Follower` each."""

    processes: int
    """Number of processes of the worker, with the first."""

    def same_for_all(self, *arguments: Any) -> list[tuple[Any, ...]]:
        """Return the same arguments for each of them."""

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
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
        self._team = team
        self._calls: list[Call] = []
        """Calls that are sent with the next one whose result matters."""
        try:
            store, port = open_store()
            device = device_of(job.worker.device)
            limit_s = job.worker.stall_s
            team.call("begin", team.same_for_all())
            team.call("build", team.same_for_all(port))
            super().__init__(job, specials, connect(store, 0, team.processes, device, limit_s))
            layout = layout_of(self.model, job.sync.fragments, job.sync.partition)
            require_equal(layout.sha256(), team.replies())
            team.call("join", team.same_for_all())
            self.join(SumsOverShards(Collectives(store, 0, team.processes, device, limit_s)))
            self.optimizer = LeadingOptimizer(self.optimizer, job, self._call_others)
        except BaseException:
            self.close()
            raise

    def seed(self, *entropy: int) -> None:
        """Let random numbers depend on these alone; each process has its own."""
        super().seed(*entropy)
        self._call_others("seed", entropy)

    def add_gradient(self, batch: Samples, summed: bool) -> Step:
        """Add the gradient of a batch; each process computes it for its part."""
        shares = self._split_equally(batch, self._accumulation, self.count)
        if shares is None:
            return Step(torch.zeros((), device=self.device), 0, torch.zeros((), device=self.device))
        (parts, idle_count), *other_shares = shares
        scale = None if self.loss_scale is None else float(self.loss_scale.scale)
        with self._with_others("add_parts", [(*share, summed, scale) for share in other_shares]):
            return self.add_parts(parts, summed, idle_count)

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """Return sums of the model's loss and metrics over the parts of all processes."""
        all_sums: list[Sums] = []
        for batch in batches:
            shares = self._split_equally(batch, 1, self._count_scored)
            if shares is None:
                continue
            (parts, idle_count), *other_shares = shares
            with self._with_others("evaluate", other_shares):
                sums = super().evaluate(parts)
                if not idle_count:
                    all_sums.append(sums)
                for member_sums in self._team.replies():
                    if member_sums is not None:
                        all_sums.append(member_sums)
        if not all_sums:
            return super().evaluate([])
        return added(all_sums)

    def gather(self, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False) -> Flat:
        """Copy a fragment of weights or gradients out of all shards."""
        assert self.shards is not None
        if out is not None:
            check(layout, fragment, out)
        with self._with_others("gather", self._team.same_for_all(fragment, gradients)):
            return self.shards.gather(layout, fragment, out, gradients)

    def scatter(self, layout: Layout, fragment: int, flat: Groups, mixing: float = 0.0) -> None:
        """Copy a fragment's arrays into all shards."""
        assert self.shards is not None
        check(layout, fragment, flat)
        with self._with_others("scatter", self._team.same_for_all(fragment, mixing)):
            self.shards.scatter(layout, fragment, flat, mixing)

    def optimizer_state(self) -> Flat:
        """Copy the state of all shards, in the same form as in a worker of one process."""
        assert self.shards is not None
        with self._with_others("export_state", self._team.same_for_all()):
            return self.shards.export_state(self.optimizer)

    def load_optimizer_state(self, state: Mapping[str, Array]) -> None:
        """Continue with a state that `optimizer_state` returned."""
        assert self.shards is not None
        self.shards.require_fit(self.optimizer, state)
        shared_states = self.shards.shared_state(state)
        with self._with_others("load_state", self._team.same_for_all(shared_states)):
            self.shards.load_state(self.optimizer, shared_states, state)

    def close(self) -> None:
        """End the other processes."""
        self._team.close()
        disconnect()

    def back_up(self) -> Backup:
        """Copy gradients and buffers, here and in the others."""
        self._call_others("back_up")
        return super().back_up()

    def undo_batch(self, backup: Backup) -> None:
        """Undo a batch, here and in the others."""
        self._call_others("undo_batch")
        super().undo_batch(backup)

    def _split_equally(self, batch: Samples, pieces: int, count: Callable[[Samples], int]) -> list[Share] | None:
        """Split a batch into equally many micro-batches for each process; None if nothing in it is scored."""
        scored_parts: list[list[Samples]] = []
        for part in split_batch(batch, self._team.processes):
            scored_parts.append([micro_batch for micro_batch in micro_batches(part, pieces) if count(micro_batch)])
        most_parts = max(len(parts) for parts in scored_parts)
        if not most_parts:
            return None
        filler = min(chain.from_iterable(scored_parts), key=len)
        shares: list[Share] = []
        for parts in scored_parts:
            idle_count = most_parts - len(parts)
            shares.append((parts + [filler] * idle_count, idle_count))
        return shares

    def _count_scored(self, part: Samples) -> int:
        return scored_in_evaluation(self._task, part)

    def _call_others(self, name: str, *arguments: Any, now: bool = False) -> None:
        """Add a call for all others, which is sent with the next one; `now` sends it at once."""
        self._calls.append((name, *arguments))
        if now:
            calls = self._calls
            self._calls = []
            self._team.call("perform", self._team.same_for_all(calls))

    @contextmanager
    def _with_others(self, name: str, arguments_of_each: Sequence[tuple[Any, ...]]) -> Iterator[None]:
        """Context in which others carry out a call, each with its own arguments, and this process its part.

        Raises:
            ProcessLostError: one of them has died or is silent.
            HyphaError: whatever one of them raises.

        """
        earlier_calls = self._calls
        self._calls = []
        calls_of_each: list[tuple[list[Call]]] = []
        for arguments in arguments_of_each:
            calls_of_each.append(([*earlier_calls, (name, *arguments)],))
        self._team.call("perform", calls_of_each)
        try:
            yield
        except Exception as error:
            raise self._root_cause(error) from error

    def _root_cause(self, error: Exception) -> Exception:
        """Return the error that caused one here: another process may have failed before."""
        try:
            self._team.replies(ERROR_WAIT_S)
        except ProcessLostError as lost:
            if is_broken(error):
                return lost
            return error
        except Exception as cause:
            return cause
        if is_broken(error):
            return ProcessLostError(str(error))
        return error


class LeadingOptimizer(Inner):
    """Optimizer of the first process's shards, which sends each of its calls to the other processes.

    Args:
        inner: optimizer of the shards.
        job: the job file.
        call_others: function that calls a method of all other processes.

    """

    def __init__(self, inner: Inner, job: Job, call_others: Callable[..., None]) -> None:
        super().__init__(inner.optimizers, job.inner_optimizer, inner_steps(job))
        self._call_others = call_others

    def zero_grad(self) -> None:
        """Forget the gradients, everywhere."""
        self._call_others("zero_grad")
        super().zero_grad()

    def reset(self) -> None:
        """Forget all state, everywhere."""
        self._call_others("reset")
        super().reset()

    def step(self, norm: Tensor | None = None, skipped: Tensor | None = None) -> None:
        """Take a step in all processes, by the norm of the whole gradient."""
        self._call_others("step", self.rates, now=True)
        super().step(norm, skipped)
