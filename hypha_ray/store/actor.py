"""The store's Ray actor: it writes while the next round trains, one round after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypha_ray.config.schema import Checkpoint
from hypha_ray.errors import CheckpointError
from hypha_ray.store.commits import CommitLog, Outcome, commit_of
from hypha_ray.store.snapshots import prune, write_snapshot
from hypha_ray.store.tensorfile import Array, digest
from hypha_ray.types import Commit, Flat, Layout


class Store:
    """Writes snapshots and commit log of a run; it lives where the run directory is.

    Args:
        directory: the run directory.
        checkpoint: how often snapshots are written, and how many stay.
        update_rounds: rounds of the run; the last one's weights are always saved.

    """

    def __init__(self, directory: str, checkpoint: Checkpoint, update_rounds: int) -> None:
        self._directory, self._checkpoint, self._update_rounds = Path(directory), checkpoint, update_rounds
        self._log = CommitLog(self._directory)
        newest = self._log.newest()
        self._parent = newest.theta_sha256 if newest else None

    def begin(self, layout: Layout, *theta: Flat) -> str:
        """Take note of the weights that the run begins or goes on with, one array for each fragment and group.

        Returns:
            Their sha256, which is the parent of the next commit.

        Raises:
            CheckpointError: they aren't those of the newest commit.

        """
        found = digest(named(layout, theta))
        if self._parent not in (None, found):
            what = f"weights differ from those of the newest commit in {self._directory}"
            raise CheckpointError("STORE007", what, got=found, allowed=str(self._parent))
        self._parent = found
        return found

    def commit(self, outcome: Outcome, layout: Layout, *flats: Flat) -> Commit:
        """Write what a round ended with: first the snapshot, if it is due, and then the record.

        Args:
            outcome: what the scheduler knows of the round.
            layout: of the model.
            flats: new weights of fragment 0, 1, …, and then new momentum of fragment 0, 1, ….

        Raises:
            CheckpointError: it isn't the next round.
            TryAgainError: the disk is full or can't be written; what was written before is intact.

        """
        self._log.expect(outcome.round)
        theta = named(layout, flats[: layout.fragments])
        outer = named(layout, flats[layout.fragments :], "parameters/")
        if self._is_due(outcome.round):
            state = {"layout_sha256": layout.sha256(), "fragments": layout.fragments, "tied": layout.tied}
            hashes = write_snapshot(self._directory, outcome.round, theta, outer, state)
        else:
            hashes = digest(theta), digest(outer)
        commit = commit_of(outcome, self._parent, *hashes)
        self._log.append(commit)
        self._parent = commit.theta_sha256
        prune(self._directory, self._checkpoint.keep)
        return commit

    def _is_due(self, round: int) -> bool:
        return (round + 1) % self._checkpoint.every_rounds == 0 or round + 1 == self._update_rounds


def named(layout: Layout, flats: Sequence[Flat], kind: str = "") -> dict[str, Array]:
    """View tensors by name; of a kind such as ``parameters/``, or all that the layout has."""
    return {
        entry.name: flats[entry.fragment][entry.group][entry.offset : entry.offset + entry.size].reshape(entry.shape)
        for entry in layout.entries
        if entry.group.startswith(kind)
    }
