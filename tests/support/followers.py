"""Processes of a worker without Ray: forks of a process with loaded libraries, told over pipes what to do."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hypha_ray.config import Job
from hypha_ray.failpoints import arm
from hypha_ray.model.task import SpecialTokens
from hypha_ray.worker.group.actor import Member
from hypha_ray.worker.group.sharded import Follower, ShardedTrainer
from hypha_ray.worker.group.shards import is_broken
from hypha_ray.worker.incarnation import ProcessLostError

REPLY_S = 60.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["hypha_ray.worker.group.sharded", "transformers.models.bert.modeling_bert"])


class Forks:
    """A team, as `ShardedTrainer` wants it, or members with whole models, as `GroupTrainer` does."""

    def __init__(self, job: Job, specials: SpecialTokens | None) -> None:
        self.processes = job.processes_of(0)
        self.reply_s = REPLY_S
        pipes = [FORKS.Pipe() for _ in range(1, self.processes)]
        self._pipes, self._waiting = [ours for ours, _ in pipes], False
        self.children = [
            FORKS.Process(target=_serve, args=(theirs, job, specials, rank), daemon=True)
            for rank, (_, theirs) in enumerate(pipes, 1)
        ]
        for child, (_, theirs) in zip(self.children, pipes, strict=True):
            child.start()
            theirs.close()

    def same_for_all(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [arguments] * len(self._pipes)

    def call(self, name: str, each: Sequence[tuple[Any, ...]]) -> None:
        self.replies()
        self._waiting = True
        for pipe, arguments in zip(self._pipes, each, strict=True):
            with suppress(OSError):  # The reply tells.
                pipe.send((name, arguments))

    def replies(self, limit_s: float | None = None) -> list[Any]:
        if not self._waiting:
            return []
        self._waiting = False
        found = [_reply(pipe, limit_s or self.reply_s) for pipe in self._pipes]
        errors = [one for one in found if isinstance(one, Exception)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, ProcessLostError))
        return found

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.join()
        for pipe in self._pipes:
            pipe.close()


class MemberWithoutRay(Member):
    """Process of a worker with whole models, which computes with the threads that it was started with."""

    def use_lease(self) -> None:
        """Do nothing."""


@contextmanager
def sharded(job: Job, specials: SpecialTokens | None = None) -> Iterator[ShardedTrainer]:
    """A trainer whose model is sharded over as many processes as the job says."""
    trainer = ShardedTrainer(job, specials, Forks(job, specials))
    try:
        yield trainer
    finally:
        trainer.close()


def _reply(pipe: Any, limit_s: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(limit_s) else ProcessLostError("silent")
    except (EOFError, OSError):
        return ProcessLostError("a process has died")


def _serve(pipe: Any, job: Job, specials: SpecialTokens | None, rank: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # With the test.
    torch.set_num_threads(1)
    arm(job.testing.failpoints, job.testing.failpoint_log)
    kind = MemberWithoutRay if job.worker.sharding == "none" else Follower
    follower = kind(job, specials, 0, rank)
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send(None if name == "begin" else getattr(follower, name)(*arguments))
        except Exception as error:
            pipe.send(ProcessLostError(str(error)) if is_broken(error) else error)
            os._exit(1)
