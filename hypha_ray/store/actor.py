"""The store's Ray actor: it writes while the next round trains, one round after the other."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import ray

from hypha_ray.config.schema import Testing
from hypha_ray.config.tables.outputs import Checkpoint
from hypha_ray.errors import CheckpointError
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import Outcome
from hypha_ray.store.lock import Lock, lock_store
from hypha_ray.store.quarantine import quarantine, quarantined
from hypha_ray.store.restore_point import RestorePoint, restart
from hypha_ray.types import Flat, Layout, Saved

GROUPS = {"pulse": 1, "intake": 1}
"""Calls that don't wait for the disk: whether it lives, and whether a state is there."""


class Store:
    """The `CommitWriter` of a run as an actor; it lives where the run directory is.

    Nothing is opened before the first call, so an unusable directory comes out as an error and not as a dead actor.
    From then on it holds the lock ``store.lock``; it waits for a predecessor that is being killed.

    Args:
        directory: the run directory.
        checkpoint: how often snapshots are written, how many stay, and where copies go.
        update_rounds: rounds of the run.
        testing: failpoints to arm.

    """

    def __init__(
        self, directory: str, checkpoint: Checkpoint, update_rounds: int, testing: Testing | None = None
    ) -> None:
        self._directory, self._checkpoint, self._update_rounds = Path(directory), checkpoint, update_rounds
        self._past: tuple[RestorePoint | None] | None = None
        self._lock: Lock | None = None
        if testing is not None:
            arm(testing.failpoints, testing.failpoint_log)

    def survey(self) -> RestorePoint | None:
        """State to resume from, without tensors; the log is cut there. None: nothing to resume.

        Raises:
            CheckpointError: see `restart`; also if another process has the lock.
            TryAgainError: the disk is full or can't be written.

        """
        past = self._read()
        return None if past is None else past.outline()

    def inner(self) -> tuple[int, ...]:
        """Workers whose inner states there are."""
        past = self._read()
        return tuple(sorted(past.inner)) if past else ()

    def recall(self, layout: Layout) -> tuple[Flat | int, ...]:
        """Weights to resume from, as in `RestorePoint.flats`, and the number of the next round as a receipt.

        To be called with ``num_returns = 2 * layout.fragments + len(inner) + 1``.

        Raises:
            CheckpointError: there is nothing, or it is of another model.

        """
        past = self._read()
        if past is None:
            raise CheckpointError("STORE006", f"there is no checkpoint in {self._directory}", fix="start anew")
        return (*past.flats(layout), past.next_round)

    def begin(self, layout: Layout, *theta: Flat) -> str:
        """See `CommitWriter.begin`; `CheckpointError` as well if another process has the lock."""
        self._past = None  # So much memory isn't needed twice.
        return self._keeper.begin(layout, *theta)

    def commit(self, outcome: Outcome, layout: Layout, inner: tuple[int, ...], *flats: Flat) -> Saved:
        """See `CommitWriter.commit`; `CheckpointError` as well if another process has the lock."""
        return self._keeper.commit(outcome, layout, inner, *flats)

    def settle(self) -> str | None:
        """See `CommitWriter.settle`; does nothing where no run has begun."""
        return self._keeper.settle() if self._lock is not None and self._past is None else None

    def quarantined(self) -> dict[int, str]:
        """See `quarantine.quarantined`; `CheckpointError` as well if another process has the lock."""
        return quarantined(self._held_directory())

    def quarantine(self, index: int, reason: str) -> None:
        """See `quarantine.quarantine`; `CheckpointError` as well if another process has the lock."""
        quarantine(self._held_directory(), index, reason)

    @ray.method(concurrency_group="intake")
    def receive(self, flat: Flat) -> None:
        """Take a state in: it is on this node then, and safe from its own's end."""

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """The process id: an answer shows that the actor lives."""
        return os.getpid()

    def _read(self) -> RestorePoint | None:
        """Read the log, once until the run begins."""
        failpoint("resume.before_read")
        if self._past is None:
            self._past = (restart(self._held_directory()),)
            if self._past[0] is not None:
                self._past[0].rewind()
        failpoint("resume.after_read")
        return self._past[0]

    @cached_property
    def _keeper(self) -> CommitWriter:
        return CommitWriter(self._held_directory(), self._checkpoint, self._update_rounds)

    def _held_directory(self) -> Path:
        if self._lock is None:
            self._lock = lock_store(self._directory)
        return self._directory
