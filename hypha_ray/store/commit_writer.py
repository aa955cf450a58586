"""Commits in order of rounds: snapshot first, then record. A full disk is tolerated for some rounds."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from hypha_ray.config.training import Checkpoint
from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.failpoints import failpoint
from hypha_ray.figures import Objective, objective_of
from hypha_ray.store.commits import CommitLog, commit_of, wrong_round
from hypha_ray.store.disk import sweep
from hypha_ray.store.mirror import Mirror
from hypha_ray.store.mirror_courier import Courier
from hypha_ray.store.snapshots import Array, digest, named, named_outer, prune, read_header, rounds, write_snapshot
from hypha_ray.types import Commit, Flat, Layout, Saved
from hypha_ray.types.rounds import RoundOutcome

_METRICS = "metrics.jsonl"


class CommitWriter:
    """Writes the snapshots and the commit log of a run. Only one exists at a time, see `hypha_ray.store.directory`.

    While the disk can't be written, records wait in memory. They are written in order, before any newer one.

    Args:
        directory: the run directory.
        checkpoint: interval of snapshots, number of snapshots to keep, and the mirror.
        update_rounds: number of rounds in the run; weights of the first and the last are always saved.
        evaluate_every: rounds between evaluations, of which the best may be kept; 0: only the last weights are
            evaluated.
        may_end_early: whether an evaluation may end the run; evaluated weights are then saved.

    Raises:
        CheckpointError: the newest record is damaged.

    """

    def __init__(
        self,
        directory: Path,
        checkpoint: Checkpoint,
        update_rounds: int,
        evaluate_every: int = 1,
        may_end_early: bool = False,
    ) -> None:
        self._directory = directory
        self._checkpoint = checkpoint
        self._update_rounds = update_rounds
        self._evaluate_every = evaluate_every
        self._evaluations = Evaluations(directory)
        self._may_be_last = may_end_early or checkpoint.best
        """Whether any evaluated weights may be wanted in the end."""
        for folder in ("commits", "checkpoints"):
            sweep(directory / folder)
        self._log = CommitLog(directory)
        self._written = len(self._log.rounds())
        """Number of records in the log, kept because listing the folder takes longer with every round."""
        self._newest = self._log.newest()
        self._parent = self._newest.theta_sha256 if self._newest else self._log.origin()
        self._backlog: list[Commit] = []
        self._failures = 0
        self._courier = Courier(Mirror(checkpoint.mirror, directory)) if checkpoint.mirror else None

    def begin(self, layout: Layout, *theta: Flat) -> str:
        """Record the weights with which the run begins or goes on. Idempotent.

        Args:
            layout: layout of the model.
            theta: weights of fragment 0, 1, …, one array for each group.

        Returns:
            Sha256 of the weights, which is the parent of the next commit.

        Raises:
            CheckpointError: the weights differ from those of the newest commit.
            TryAgainError: the disk is full or can't be written.

        """
        if self._newest is not None:
            failpoint("resume.before_begin")
        theta_sha256 = digest(named(layout, theta))
        if self._newest is not None and self._newest.theta_sha256 != theta_sha256:
            problem = f"weights differ from those of the newest commit in {self._directory}"
            raise CheckpointError("STORE007", problem, got=theta_sha256, allowed=self._newest.theta_sha256)
        if self._newest is None:
            self._log.begin(theta_sha256)
        self._parent = theta_sha256
        return theta_sha256

    def commit(self, outcome: RoundOutcome, layout: Layout, inner: tuple[int, ...], *flats: Flat) -> Saved:
        """Write a round's results: first the snapshot, if it is due, then the record.

        Repeated for the newest round, the call only makes sure that both are written.

        Args:
            outcome: the round, from the scheduler.
            layout: layout of the model.
            inner: numbers of the workers whose inner state is saved.
            flats: new weights of fragment 0, 1, …, then new momentum of fragment 0, 1, …, then one inner state for each
                number in `inner`.

        Returns:
            The record, and a warning if something couldn't be written: its name, the missing space, and a remedy.

        Raises:
            CheckpointError: the round is not the next one, nor the newest one with the same outcome.
            TryAgainError: too many rounds in a row couldn't be written, or the last one; earlier files are intact.

        """
        if outcome.state.get("last"):  # The run ends by samples, in this round.
            self._update_rounds = outcome.round + 1
        parts = _SnapshotParts.of(outcome, layout, inner, flats)
        repeated_commit = self._newest if self._newest and outcome.round == self._newest.round else None
        if repeated_commit:
            _compare(repeated_commit, outcome, parts)
        else:
            self._require_next(outcome.round)
        failpoint("store.before_snapshot")
        hashes, refusal = self._save_snapshot(outcome.round, parts)
        failpoint("store.before_record")
        commit = repeated_commit or self._queue_record(commit_of(outcome, self._parent, *hashes))
        return self._save_records(commit, refusal)

    def _require_next(self, round: int) -> None:
        """Raise an error unless this is the number of the next round."""
        next_round = self._newest.round + 1 if self._newest else 0
        if round < next_round:
            raise wrong_round(round, round, next_round)
        if round > next_round:
            missing_text = f"round {next_round + 1}"
            problem = f"what {self._directory} has ends before {missing_text}: a store died before the disk took more"
            fix = "make room, and start the run again; it goes on from there"
            raise TryAgainError("STORE010", problem, f"round {round + 1}", missing_text, fix)

    def _save_snapshot(self, round: int, parts: _SnapshotParts) -> tuple[tuple[str, str], TryAgainError | None]:
        """Write a snapshot if it is due; returns the hashes of weights and momentum, and the error if it failed."""
        try:
            if self._written:
                self._write_backlog()
            if self._is_due(round):
                state = {**parts.state, "records": self._written}
                return write_snapshot(self._directory, round, parts.theta, parts.outer, parts.inner, state), None
        except TryAgainError as error:
            return parts.hashes(), error
        return parts.hashes(), None

    def _is_due(self, round: int) -> bool:
        """Whether a snapshot is due: by its interval, or because an earlier one failed, and there is no good one."""
        last_round = self._update_rounds - 1
        is_regular = (round + 1) % self._checkpoint.every_rounds == 0 or round in (0, last_round)
        is_regular = is_regular or (self._may_be_last and self._is_evaluated(round))
        return (is_regular or self._failures > 0) and not self._is_good(round)

    def _is_evaluated(self, round: int) -> bool:
        """Whether the weights after a round are to be evaluated, apart from those after the last."""
        return self._evaluate_every > 0 and (round + 1) % self._evaluate_every == 0

    def _is_good(self, round: int) -> bool:
        """Whether the round has a snapshot whose header names the same hashes as the commit record."""
        try:
            commit = self._log.load(round)
        except CheckpointError:
            return False
        header = read_header(self._directory, round)
        return header is not None and header.hashes == (commit.theta_sha256, commit.outer_sha256)

    def _good_rounds(self) -> list[int]:
        return [round for round in rounds(self._directory) if self._is_good(round)]

    def _queue_record(self, commit: Commit) -> Commit:
        """Make a commit the newest one, whose record is written next; returns it."""
        self._newest = commit
        self._parent = commit.theta_sha256
        self._backlog.append(commit)
        return commit

    def _write_backlog(self) -> None:
        """Write the waiting records, oldest first."""
        while self._backlog:
            self._log.append(self._backlog[0])
            self._written = self._backlog[0].round + 1
            del self._backlog[0]

    def _save_records(self, commit: Commit, refusal: TryAgainError | None) -> Saved:
        """Write the newest record, and return the result of the commit."""
        try:
            if refusal is None or self._written:  # A log without any snapshot is useless.
                self._write_backlog()
        except TryAgainError as error:
            refusal = refusal or error
        if refusal is not None:
            return self._count_failure(commit, refusal)
        failpoint("store.after_record")
        self._failures = 0
        good_rounds = self._good_rounds()
        if self._courier is not None and commit.round in good_rounds:
            self._courier.send(commit.round, self._checkpoint.keep)
        self._prune(good_rounds)
        if self._courier is None:
            return Saved(commit, None)
        return Saved(commit, self._courier.news())

    def settle(self) -> str | None:
        """Wait until the mirror has the newest snapshot, or is late; returns a problem that wasn't reported yet."""
        if self._courier is None:
            return None
        problem = self._courier.settle()
        self._prune(self._good_rounds())
        return problem

    def _prune(self, good_rounds: list[int]) -> None:
        """Remove old snapshots, except one that is being copied, and those that are or may become the best."""
        copied_round = None if self._courier is None else self._courier.busy
        spared_rounds = set() if copied_round is None else {copied_round}
        if self._checkpoint.best:
            spared_rounds |= self._best_candidates(good_rounds)
        newest_rounds = good_rounds[-self._checkpoint.keep :]
        prune(self._directory, min(newest_rounds, default=0), spared_rounds)

    def _best_candidates(self, good_rounds: list[int]) -> set[int]:
        """Round of the best evaluation, and those of `good_rounds` whose evaluation is still to come."""
        last_evaluated = self._evaluations.newest
        best = self._evaluations.best
        candidates = set() if best is None else {best["round"]}
        for round in good_rounds:
            if self._is_evaluated(round) and (last_evaluated is None or round > last_evaluated):
                candidates.add(round)
        return candidates

    def _count_failure(self, commit: Commit, refusal: TryAgainError) -> Saved:
        """Tolerate a disk that can't be written for `checkpoint.failures` rounds, but not in the last round."""
        self._failures += 1
        if self._failures >= self._checkpoint.failures or commit.round == self._update_rounds - 1:
            raise refusal
        count_text = f"{self._failures} of {self._checkpoint.failures} rounds in a row"
        text = f"{refusal.what}; {refusal.got}, needed {refusal.allowed}; {refusal.fix} ({count_text})"
        return Saved(commit, text, written=not self._backlog)


def _compare(commit: Commit, outcome: RoundOutcome, parts: _SnapshotParts) -> None:
    """Raise `CheckpointError` unless a commit has this outcome."""
    repeated_commit = commit_of(outcome, commit.parent_sha256, *parts.hashes())
    if repeated_commit != commit:
        problem = f"round {commit.round + 1} is committed already, with another outcome"
        got = f"weights {repeated_commit.theta_sha256}"
        fix = "is another run writing to this directory?"
        raise CheckpointError("STORE003", problem, got, f"weights {commit.theta_sha256}", fix)


@dataclass(frozen=True, slots=True)
class _SnapshotParts:
    """Contents of a snapshot."""

    theta: dict[str, Array]
    outer: dict[str, Array]
    inner: dict[int, Flat]
    state: dict[str, Any]

    @classmethod
    def of(
        cls, outcome: RoundOutcome, layout: Layout, inner: tuple[int, ...], flats: tuple[Flat, ...]
    ) -> _SnapshotParts:
        theta = flats[: layout.fragments]
        momentum = flats[layout.fragments : 2 * layout.fragments]
        inner_states = flats[2 * layout.fragments :]
        state = {
            "layout_sha256": layout.sha256(),
            "fragments": layout.fragments,
            "tied": layout.tied,
            "entries": [astuple(entry) for entry in layout.entries],
            "frozen_sha256": layout.frozen_sha256,
            "scheduler": dict(outcome.state),
        }
        return cls(
            named(layout, theta),
            named_outer(layout, momentum),
            dict(zip(inner, inner_states, strict=True)),
            state,
        )

    def hashes(self) -> tuple[str, str]:
        return digest(self.theta), digest(self.outer)


class Evaluations:
    """Evaluations in the ``metrics.jsonl`` of a run directory."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / _METRICS
        self._read_bytes = 0
        """Size of the part of the file that was read, which ends with a line."""
        self._records: dict[int, dict[str, Any]] = {}
        """Record of each evaluated round."""

    @property
    def newest(self) -> int | None:
        """The newest round that is evaluated; None before the first."""
        self._read()
        return max(self._records, default=None)

    @property
    def objective(self) -> Objective:
        """Figure by which the evaluations are compared."""
        self._read()
        return objective_of(self._records.values())

    @property
    def best(self) -> dict[str, Any] | None:
        """Record of the best evaluation, the earliest of equal ones; None as long as none has a finite objective."""
        objective = self.objective
        records = []
        for round in sorted(self._records):
            if self._records[round].get(objective.name) is not None:
                records.append(self._records[round])
        if not records:
            return None
        best: dict[str, Any] = objective.best(records, key=lambda record: record[objective.name])
        return best

    def _read(self) -> None:
        """Read the lines that are new since the last call; all lines if the file was cut."""
        try:
            with self._file.open("rb") as file:
                if file.seek(0, 2) < self._read_bytes:
                    self._read_bytes = 0
                    self._records = {}
                file.seek(self._read_bytes)
                lines = file.read().split(b"\n")
        except OSError:
            return
        for line in lines[:-1]:
            self._read_bytes += len(line) + 1
            if b'"eval"' in line:
                self._add_record(line)

    def _add_record(self, line: bytes) -> None:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("kind") == "eval" and isinstance(record.get("round"), int):
                self._records[record["round"]] = record
