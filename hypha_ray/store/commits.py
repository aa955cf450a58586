"""The commit log: one JSON file for each outer round, with the hashes of the weights before and after it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter

from hypha_ray.errors import CheckpointError, HyphaError, first_line
from hypha_ray.failpoints import failpoint
from hypha_ray.store.disk import publish, publish_once, room_for, sealed, sync, unsealed, write_file
from hypha_ray.types import Commit, Span
from hypha_ray.types.rounds import RoundOutcome

_COMMIT = TypeAdapter(Commit)
_RECORD = re.compile(r"round_(\d{6,})\.json")


def reduction_of(outcome: RoundOutcome) -> int:
    """Version of the weights before a round's last reduction; with a barrier that is the round's number."""
    return int(outcome.state.get("step", outcome.round + 1)) - 1


def commit_of(outcome: RoundOutcome, parent_sha256: str | None, theta_sha256: str, outer_sha256: str) -> Commit:
    """Commit record of a round and its hashes."""
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
        responders=outcome.responders,
    )


def check_chain(commits: Sequence[Commit]) -> None:
    """Check that records form a chain without a gap, from round 0.

    Raises:
        CheckpointError: a record is missing, or its parent isn't the previous record's result.

    """
    parent = None
    for round, commit in enumerate(commits):
        if commit.round != round:
            raise wrong_round(round, commit.round, round)
        if round > 0 and commit.parent_sha256 != parent:
            raise broken_chain(round, f"parent {commit.parent_sha256}", f"parent {parent}")
        parent = commit.theta_sha256


class CommitLog:
    """The records under ``commits/`` of a run directory.

    A record is written under a temporary name, fsynced and then renamed, so after a crash it is complete or absent. Its
    last field is a checksum of the others. ``origin.json``, beside the folder, has the hash of the initial weights.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "commits"
        self._origin = directory / "origin.json"
        self._last: Commit | None = None
        """The newest record, if this object wrote it; saves listing the folder."""

    def begin(self, theta_sha256: str) -> None:
        """Record the weights with which round 0 begins.

        Raises:
            TryAgainError: the disk is full or can't be written.

        """
        data = sealed({"theta_sha256": theta_sha256})
        temporary = self._folder / "round_origin.tmp"
        with room_for(temporary, len(data)):
            write_file(temporary, data)
            publish(temporary, self._origin)

    def origin(self) -> str | None:
        """Sha256 of the weights with which round 0 begins; None if it isn't known."""
        try:
            record = unsealed(self._origin.read_bytes())
            return str(record["theta_sha256"])
        except (OSError, ValueError, KeyError):
            return None

    def append(self, commit: Commit) -> None:
        """Add the record of the next round. Idempotent; after the return, the record survives any crash.

        Raises:
            CheckpointError: it isn't the next round, its parent isn't the previous record's result, or another process
                has just written this record.
            TryAgainError: the disk is full or can't be written.

        """
        newest_commit = self._last or self.newest()
        path = self.path(commit.round)
        if newest_commit == commit:
            with room_for(path, 0):
                sync(self._folder)
            return
        next_round = 0 if newest_commit is None else newest_commit.round + 1
        if commit.round != next_round:
            raise wrong_round(commit.round, commit.round, next_round)
        if newest_commit is not None and commit.parent_sha256 != newest_commit.theta_sha256:
            raise broken_chain(commit.round, f"parent {commit.parent_sha256}", f"parent {newest_commit.theta_sha256}")
        writer = uuid4().hex  # Two writers never mix their bytes.
        temporary = path.with_suffix(f".{writer}.tmp")
        try:
            self._write(sealed(_encoded(commit)), temporary, path)
        except HyphaError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._last = commit

    def newest(self) -> Commit | None:
        """Return the last record; None: there is none."""
        rounds = self.rounds()
        return self.load(rounds[-1]) if rounds else None

    def read(self) -> tuple[Commit, ...]:
        """Return all records, oldest first.

        Raises:
            CheckpointError: a record is damaged.

        """
        return tuple(self.load(round) for round in self.rounds())

    def set_aside(self, first_round: int) -> None:
        """Move the records of a round and of all later ones to a new folder ``rewound/<n>``.

        The newest is moved first, so that a crash in between leaves a chain.
        """
        self._last = None
        rounds = [round for round in self.rounds() if round >= first_round]
        if not rounds:
            return
        numbers = [int(path.name) for path in self._folder.glob("rewound/*") if path.name.isdecimal()]
        folder_number = max(numbers, default=0) + 1
        folder = self._folder / "rewound" / str(folder_number)
        with room_for(folder / "record", 0):
            for round in reversed(rounds):
                path = self.path(round)
                path.rename(folder / path.name)
                sync(folder)
                sync(self._folder)

    def rounds(self) -> list[int]:
        """Numbers of all records, ascending, damaged ones included; other files are ignored."""
        if not self._folder.is_dir():
            return []
        with os.scandir(self._folder) as entries:
            matches = [_RECORD.fullmatch(entry.name) for entry in entries]
        return sorted(int(match[1]) for match in matches if match)

    def path(self, round: int) -> Path:
        """File of a round's record."""
        return self._folder / f"round_{round:06d}.json"

    def load(self, round: int) -> Commit:
        """Read a round's record.

        Raises:
            CheckpointError: the record is damaged or missing.

        """
        path = self.path(round)
        try:
            commit = _decoded(unsealed(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"commit record {path} is damaged"
            raise CheckpointError("STORE002", problem, got=first_line(error), fix="restore the file") from error
        if commit.round != round:
            raise broken_chain(round, f"the record of round {commit.round + 1}", f"round {round + 1}")
        return commit

    def _write(self, data: bytes, temporary: Path, path: Path) -> None:
        with room_for(path, len(data)):
            write_file(temporary, data)
            failpoint("store.before_link")
            try:
                publish_once(temporary, path)
            except FileExistsError:
                problem = f"another run writes to {self._folder.parent}"
                fix = "end it, or give this one another run.name"
                raise CheckpointError("STORE008", problem, got=f"a record {path.name}", fix=fix) from None


def _encoded(commit: Commit) -> dict[str, Any]:
    """Fields of a JSON record. A span is [epoch, slice, start, stop], and a prompt [epoch, slice, index].

    `blamed` is written only if it is false, and `responders` only if there are any.
    """
    rejected = []
    for rejection in commit.rejected:
        record: dict[str, Any] = {"worker": rejection.worker, "reason": rejection.reason}
        if not rejection.blamed:
            record["blamed"] = False
        rejected.append(record)
    spans = {}
    for worker, worker_spans in commit.spans:
        spans[worker] = [list(span) for span in worker_spans]
    fields = {**asdict(commit), "spans": spans, "rejected": rejected}
    del fields["responders"]
    if commit.responders:
        fields["responders"] = {part.responder: [list(prompt) for prompt in part.prompts] for part in commit.responders}
    return fields


def _decoded(record: dict[str, Any]) -> Commit:
    """Commit of a JSON record, with names and types checked."""
    spans = []
    for worker, worker_spans in record["spans"].items():
        spans.append((int(worker), [Span(*span) for span in worker_spans]))
    responders = tuple(record.get("responders", {}).items())
    return _COMMIT.validate_python({**record, "spans": spans, "responders": responders})


def broken_chain(round: int, got: str, allowed: str) -> CheckpointError:
    """Error for a round, counted from 0, that doesn't follow the previous one."""
    problem = f"the commit log's chain breaks at round {round + 1}"
    return CheckpointError("STORE003", problem, got, allowed, fix="is another run writing to this directory?")


def wrong_round(round: int, got: int, allowed: int) -> CheckpointError:
    """Error for a record of another round than the next one; all rounds are counted from 0."""
    return broken_chain(round, f"round {got + 1}", f"round {allowed + 1}")
