"""The commit log: one JSON file for each outer round, each naming the weights that it began with and ended with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from hypha_ray.errors import CheckpointError
from hypha_ray.store.disk import publish, room_for, sealed, unsealed, write_file
from hypha_ray.types import Commit, Span, Verdict

_COMMIT = TypeAdapter(Commit)


class Outcome(Protocol):
    """A round as the scheduler knows it: all of a `Commit` but the hashes."""

    @property
    def round(self) -> int:
        """Number of the round, from 0."""

    @property
    def verdict(self) -> Verdict:
        """Which deltas went in, and which did not."""

    @property
    def spans(self) -> tuple[tuple[int, tuple[Span, ...]], ...]:
        """What each accepted delta was trained on, by worker."""

    @property
    def cursors(self) -> Mapping[int, int]:
        """Samples used of each slice in `epoch`."""

    @property
    def epoch(self) -> int:
        """The oldest epoch that isn't complete."""

    @property
    def ahead(self) -> Mapping[int, Mapping[int, int]]:
        """Samples used of each slice in newer epochs."""


def commit_of(outcome: Outcome, parent_sha256: str | None, theta_sha256: str, outer_sha256: str) -> Commit:
    """Put a round and its hashes together."""
    return Commit(
        round=outcome.round,
        parent_sha256=parent_sha256,
        theta_sha256=theta_sha256,
        outer_sha256=outer_sha256,
        deltas=outcome.verdict.accepted,
        spans=outcome.spans,
        cursors=dict(outcome.cursors),
        epoch=outcome.epoch,
        ahead={epoch: dict(cursors) for epoch, cursors in outcome.ahead.items()},
        rejected=outcome.verdict.rejected,
    )


def _encoded(commit: Commit) -> dict[str, Any]:
    """Fields as JSON has them; a span is a list of epoch, slice, start and stop."""
    return {**asdict(commit), "spans": {worker: [astuple(span) for span in spans] for worker, spans in commit.spans}}


def _decoded(record: dict[str, Any]) -> Commit:
    """Check types and names, and make a record of them."""
    spans = [(int(worker), [Span(*span) for span in spans]) for worker, spans in record["spans"].items()]
    return _COMMIT.validate_python({**record, "spans": spans})


class CommitLog:
    """The records under ``commits/`` of a run directory.

    A record is written under a temporary name, fsynced and renamed, so after a crash it is wholly there or absent. It
    ends with a checksum of itself.

    Args:
        directory: the run directory.

    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "commits"

    def append(self, commit: Commit) -> None:
        """Add the record of the next round; once this returns, it survives any crash.

        Raises:
            CheckpointError: it isn't the next round, or didn't begin with the weights that the last one ended with.
            TryAgainError: the disk is full or can't be written.

        """
        self.expect(commit.round)
        newest = self.newest()
        if newest is not None and commit.parent_sha256 != newest.theta_sha256:
            raise _broken(commit.round, f"parent {commit.parent_sha256}", f"parent {newest.theta_sha256}")
        path = self._path(commit.round)
        data = sealed(_encoded(commit))
        with room_for(path, len(data)):
            temporary = path.with_suffix(".tmp")
            write_file(temporary, data)
            publish(temporary, path)

    def expect(self, round: int) -> None:
        """Raise `CheckpointError` unless this is the number of the next round."""
        due = max(self._rounds(), default=-1) + 1
        if round != due:
            raise _broken(round, f"round {round}", f"round {due}")

    def newest(self) -> Commit | None:
        """Return the last record; None: there is none."""
        rounds = self._rounds()
        return self._load(rounds[-1]) if rounds else None

    def read(self) -> tuple[Commit, ...]:
        """Return all records, oldest first.

        Raises:
            CheckpointError: a record is damaged.

        """
        return tuple(self._load(round) for round in self._rounds())

    def verify(self) -> None:
        """Check that the records form a chain without a gap.

        Raises:
            CheckpointError: a record is damaged or missing, or doesn't follow on the one before it.

        """
        parent = None
        for due, commit in enumerate(self.read()):
            if commit.round != due:
                raise _broken(due, f"round {commit.round}", f"round {due}")
            if due > 0 and commit.parent_sha256 != parent:
                raise _broken(due, f"parent {commit.parent_sha256}", f"parent {parent}")
            parent = commit.theta_sha256

    def _rounds(self) -> list[int]:
        """Numbers of the records that are there, ascending; other files are none of ours."""
        names = (re.fullmatch(r"round_(\d{6,})\.json", path.name) for path in self._folder.glob("round_*.json"))
        return sorted(int(name[1]) for name in names if name)

    def _path(self, round: int) -> Path:
        return self._folder / f"round_{round:06d}.json"

    def _load(self, round: int) -> Commit:
        path = self._path(round)
        try:
            commit = _decoded(unsealed(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"commit record {path} is damaged"
            raise CheckpointError("STORE002", what, got=str(error).splitlines()[0], fix="restore the file") from error
        if commit.round != round:
            raise _broken(round, f"the record of round {commit.round}", f"round {round}")
        return commit


def _broken(round: int, got: str, allowed: str) -> CheckpointError:
    what = f"the commit log's chain breaks at round {round}"
    return CheckpointError("STORE003", what, got, allowed, fix="is another run writing to this directory?")
