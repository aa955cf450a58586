"""A worker of several processes: the trainer in the first one, and the others, which are Ray actors in its lease.

    batch ──┬── part 0 ──► gradient ─┐
            ├── part 1 ──► gradient ─┼─ sum ──► clip, optimizer step ──► new weights to all processes
            └── part 2 ──► gradient ─┘

Weights, the optimizer's state and everything that is exchanged or saved are in the first process. So codecs, fragments,
strategies and replay work as in a worker of one process. The others hold only a copy of the model, or their shards of
model, gradients and optimizer. They end with the first process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor

from hypha_ray.children import ListedActor, own_cores, own_gpus, start_child
from hypha_ray.config import Job
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.model.layout import layout_of
from hypha_ray.model.task import SpecialTokens
from hypha_ray.optim.step import PendingStep, Step
from hypha_ray.types import Samples, Sums, added
from hypha_ray.worker.group.collectives import Collectives, find_store, open_store, require_equal, split_batch
from hypha_ray.worker.incarnation import ProcessLostError
from hypha_ray.worker.supervised import SupervisedTrainer

if TYPE_CHECKING:
    from hypha_ray.worker.group.sharded import Team


ERROR_WAIT_S = 10.0
"""Longest wait in seconds for the errors of other processes, after one has failed."""
END_DELAY_S = 1.0
"""Seconds that a process lives on after its error, so that the error reaches the first process."""


class Member(ListedActor):
    """One process of a worker, as a Ray actor. It leaves SIGTERM to the first process.

    Args:
        job: the job file.
        specials: special tokens, as `SupervisedTrainer` takes them.
        worker: number of the worker.
        rank: number of the process in its worker, from 1.

    """

    def __init__(self, job: Job, specials: SpecialTokens | None, worker: int, rank: int) -> None:
        _prepare_process(job)
        self._job = job
        self._specials = specials
        self._worker = worker
        self._rank = rank
        self._collectives: Any = None

    def build(self) -> str:
        """Build the model; return the fingerprint of its layout."""
        self.use_lease()
        self._trainer = SupervisedTrainer(self._job, self._specials)
        return layout_of(self._trainer.model).sha256()

    def use_lease(self) -> None:
        """Compute with the cores and GPUs that Ray has given to this process."""
        from hypha_ray.model.environment import use_gpus, use_threads

        use_threads(own_cores())
        use_gpus(own_gpus())

    def join(self, port: int) -> None:
        """Connect to the other processes, whose store has this port."""
        processes = self._job.processes_of(self._worker)
        limit_s = self._job.worker.stall_s
        store = find_store(port, limit_s)
        self._collectives = Collectives(store, self._rank, processes, self._trainer.device, limit_s)
        self._trainer.join(self._collectives)

    def seed(self, entropy: tuple[int, ...]) -> None:
        """Let random numbers depend on these, and on the number of this process."""
        self._trainer.seed(*entropy, self._rank)

    def add_gradient(self, part: Samples, has_stale_weights: bool, summed: bool) -> None:
        """Compute the gradient of a part of a batch, and add it to those of the others."""
        with self._taking_part(has_stale_weights):
            failpoint("worker.process", self._worker)
            part = _copied(part)
            self._trainer.optimizer.zero_grad()
            self._trainer.add_gradient(part, summed)

    def evaluate(self, part: Samples, has_stale_weights: bool) -> Sums:
        """Return figures of a part of a batch."""
        with self._taking_part(has_stale_weights):
            batches = [_copied(part)] if len(part) else []
            return self._trainer.evaluate(batches)

    @contextmanager
    def _taking_part(self, has_stale_weights: bool) -> Iterator[None]:
        """Context with the first process's weights; after an error the others don't wait for this process.

        It closes its connections, and ends after its error has reached the first process.
        """
        try:
            if has_stale_weights:
                self._collectives.copy_out(self._trainer.tensors)
            yield
        except BaseException:
            self._collectives.close()
            _end_after_delay()
            raise


class ShardedMember(ListedActor):
    """One process of a worker whose model is sharded, as a Ray actor. It leaves SIGTERM to the first process.

    Args:
        job: the job file.
        specials: special tokens, as `SupervisedTrainer` takes them.
        worker: number of the worker.
        rank: number of the process in its worker, from 1.

    """

    def __init__(self, job: Job, specials: SpecialTokens | None, worker: int, rank: int) -> None:
        _prepare_process(job)
        self._arguments = job, specials, worker, rank

    def begin(self) -> None:
        """Load libraries."""
        from hypha_ray.model.environment import use_gpus, use_threads
        from hypha_ray.worker.group.sharded import Follower

        use_threads(own_cores())
        use_gpus(own_gpus())
        self._follower = Follower(*self._arguments)

    def build(self, port: int) -> str:
        """Connect to the other processes and build the model, as `Follower.build`."""
        return self._follower.build(port)

    def join(self) -> None:
        """Take part in sums from here on."""
        self._follower.join()

    def perform(self, calls: Sequence[tuple[Any, ...]]) -> Any:
        """Carry out calls, as `Follower.perform`; after an error this process ends.

        Raises:
            ProcessLostError: another process has died or is silent.

        """
        from hypha_ray.worker.group.shards import is_broken

        try:
            return self._follower.perform(calls)
        except BaseException as error:
            _end_after_delay()
            if isinstance(error, RuntimeError) and is_broken(error):
                raise ProcessLostError(f"a process of this worker has died or is silent: {error}") from None
            raise


class Members:
    """All processes of a worker but the first, which calls them.

    Args:
        job: the job file.
        specials: special tokens, as `SupervisedTrainer` takes them.
        worker: number of the worker.
        actor_class: class of the actors.

    """

    def __init__(self, job: Job, specials: SpecialTokens | None, worker: int, actor_class: type = Member) -> None:
        self.processes = job.processes_of(worker)
        """Number of processes of the worker, with the first."""
        self._deadline_s = job.worker.stall_s
        self._actors = [start_child(actor_class, job, specials, worker, rank) for rank in range(1, self.processes)]
        self._replies: list[Any] = []

    def same_for_all(self, *arguments: Any) -> list[tuple[Any, ...]]:
        """Return the same arguments for each of them."""
        return [arguments] * len(self._actors)

    def call(self, name: str, each: Sequence[tuple[Any, ...]]) -> None:
        """Call a method of all processes, each with arguments of its own; earlier calls have to be done.

        Raises:
            ProcessLostError: one of them has died or is silent.
            HyphaError: whatever an earlier call raised.

        """
        self.replies()
        pairs = zip(self._actors, each, strict=True)
        self._replies = [getattr(actor, name).remote(*arguments) for actor, arguments in pairs]

    def replies(self, limit_s: float | None = None) -> list[Any]:
        """Wait for the results of the latest call, and forget them.

        Args:
            limit_s: longest wait for the next result; None: the time after which a process counts as silent.

        Raises:
            ProcessLostError: one of the processes has died or is silent.
            HyphaError: whatever one of them raises.

        """
        refs = self._replies
        self._replies = []
        waiting_refs = list(refs)
        errors = list[Exception]()
        if limit_s is None:
            limit_s = self._deadline_s
        while waiting_refs:
            ready_refs, waiting_refs = ray.wait(waiting_refs, timeout=limit_s)
            if not ready_refs:
                break
            error = _error_of(ready_refs[0])
            if error is not None:
                errors.append(error)
                limit_s = min(limit_s, ERROR_WAIT_S)
        if errors:
            raise min(
                errors, key=lambda error: isinstance(error, ProcessLostError)
            )  # Another error is the cause of a lost process.
        if waiting_refs:
            silent_text = (
                "1 process of this worker is" if len(waiting_refs) == 1 else f"{len(waiting_refs)} of its processes are"
            )
            raise ProcessLostError(f"{silent_text} silent for {limit_s:g} s")
        return [ray.get(ref) for ref in refs]

    def close(self) -> None:
        """End all of them."""
        for actor in self._actors:
            ray.kill(actor)


def _prepare_process(job: Job) -> None:
    """Arm failpoints, and leave SIGTERM to the first process."""
    arm(job.testing.failpoints, job.testing.failpoint_log)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_after_delay() -> None:
    """End this process, once an error has gone to the first one."""
    threading.Timer(END_DELAY_S, os._exit, (1,)).start()


def _copied(part: Samples) -> Samples:
    """Copy samples, because torch makes no tensors of read-only arrays, such as Ray's."""
    arrays = {name: np.array(array) for name, array in part.arrays.items()}
    return Samples(arrays, part.keys)


def _error_of(ref: Any) -> Exception | None:
    """Error of a call that is over; None if it has a result."""
    try:
        ray.get(ref)
    except RayActorError as error:
        first_line = str(error).partition("\n")[0]
        return ProcessLostError(f"a process of this worker has died: {first_line}")
    except RayTaskError as error:
        cause = error.cause
        return cause if isinstance(cause, Exception) else error
    return None


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
        pending_step = super().begin_step(batch)
        self._has_stale_members = True
        return pending_step

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
            self._members.replies()  # This raises the error of a process, if that was the cause.
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
