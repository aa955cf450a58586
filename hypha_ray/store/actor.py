"""The store's Ray actor, which writes committed rounds in order while the next round trains."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import ray

from hypha_ray import traces
from hypha_ray.children import ListedActor
from hypha_ray.config.schema import Rounds, Testing
from hypha_ray.config.training import Checkpoint
from hypha_ray.errors import CheckpointError
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import reduction_of
from hypha_ray.store.directory import Lock, lock_store, quarantine, quarantined
from hypha_ray.store.restore_point import RestorePoint, restart
from hypha_ray.types import Flat, Layout, Saved
from hypha_ray.types.rounds import RoundOutcome, attempt_of

GROUPS = {"pulse": 1, "intake": 1}
"""Concurrency groups of calls that don't wait for the disk: liveness checks, and the receipt of arrays."""


class Store(ListedActor):
    """The `CommitWriter` of a run as an actor, on the node of the run directory.

    Nothing is opened before the first call, so an unusable directory raises an error instead of ending the actor. From
    then on the actor holds the lock ``store.lock``; it waits for a predecessor that is being killed.
    """

    def __init__(
        self,
        directory: str,
        checkpoint: Checkpoint,
        rounds: Rounds,
        testing: Testing | None = None,
        sinks: Collection[str] = (),
    ) -> None:
        self._directory = Path(directory)
        self._checkpoint = checkpoint
        self._rounds = rounds
        self._has_read = False
        self._restore_point: RestorePoint | None = None
        """State to resume from, with its tensors until the run begins; None: nothing was read, or there is nothing."""
        self._lock: Lock | None = None
        if testing is not None:
            arm(testing.failpoints, testing.failpoint_log)
        traces.begin(sinks, self._directory.name, ray.get_runtime_context)

    def survey(self) -> RestorePoint | None:
        """Return the state to resume from, without tensors, and cut the log there. None: nothing to resume.

        Raises:
            CheckpointError: see `restart`.
            TryAgainError: the disk is full or can't be written.

        """
        restore_point = self._read()
        return None if restore_point is None else restore_point.outline()

    def inner(self) -> tuple[int, ...]:
        """Numbers of the workers with a saved inner state."""
        restore_point = self._read()
        return tuple(sorted(restore_point.inner)) if restore_point else ()

    def recall(self, layout: Layout) -> tuple[Flat | int, ...]:
        """Return the weights to resume from, as `RestorePoint.flats`, and the number of the next round as a receipt.

        Call it with ``num_returns = 2 * layout.fragments + len(inner) + 1``.

        Raises:
            CheckpointError: there is no checkpoint, or it is one of another model.

        """
        restore_point = self._read()
        if restore_point is None:
            raise CheckpointError("STORE006", f"there is no checkpoint in {self._directory}", fix="start anew")
        return (*restore_point.flats(layout), restore_point.next_round)

    def begin(self, layout: Layout, *theta: Flat) -> str:
        """Record the weights with which the run begins or goes on, by `CommitWriter.begin`."""
        self._has_read = False
        self._restore_point = None  # Frees the tensors read for a resume.
        return self._writer.begin(layout, *theta)

    def commit(self, outcome: RoundOutcome, layout: Layout, inner: tuple[int, ...], *flats: Flat) -> Saved:
        """Write a round's results, by `CommitWriter.commit`."""
        attempts = [attempt_of(contribution.incarnation) for contribution in outcome.verdict.accepted]
        key = traces.RoundKey(max(attempts, default=0), reduction_of(outcome))
        with traces.traced("commit", key, commit=outcome.round):
            return self._writer.commit(outcome, layout, inner, *flats)

    def settle(self) -> str | None:
        """Wait for the mirror, by `CommitWriter.settle`; does nothing before the run has begun."""
        has_begun = self._lock is not None and not self._has_read
        return self._writer.settle() if has_begun else None

    def quarantined(self) -> dict[int, str]:
        """Reasons of quarantined slices, by index."""
        return quarantined(self._locked_directory())

    def quarantine(self, index: int, reason: str) -> None:
        """Leave a slice out for the rest of the run. Idempotent."""
        quarantine(self._locked_directory(), index, reason)

    @ray.method(concurrency_group="intake")
    def receive(self, flat: Flat) -> None:
        """Bring arrays to this node, where they survive the end of the node that made them."""

    @ray.method(concurrency_group="pulse")
    def flush_traces(self) -> None:
        """Export the last spans, as `tracing.flush`."""
        traces.flush()

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """Process id; an answer shows that the actor is alive."""
        return os.getpid()

    def _read(self) -> RestorePoint | None:
        """Read the log, only once until the run begins."""
        failpoint("resume.before_read")
        if not self._has_read:
            self._restore_point = restart(self._locked_directory())
            self._has_read = True
            if self._restore_point is not None:
                self._restore_point.rewind()
        failpoint("resume.after_read")
        return self._restore_point

    @cached_property
    def _writer(self) -> CommitWriter:
        rounds = self._rounds
        may_end_early = rounds.patience is not None
        directory = self._locked_directory()
        return CommitWriter(directory, self._checkpoint, rounds.update_rounds, rounds.evaluate_every, may_end_early)

    def _locked_directory(self) -> Path:
        """Path of the run directory, whose lock is taken if need be."""
        if self._lock is None:
            self._lock = lock_store(self._directory)
        return self._directory
