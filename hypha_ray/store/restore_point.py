"""Resumption of a run from the newest commit that has an undamaged snapshot with the same hashes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypha_ray.errors import CheckpointError
from hypha_ray.store.commits import CommitLog, check_chain
from hypha_ray.store.disk import sweep
from hypha_ray.store.snapshots import (
    Array,
    Snapshot,
    flattened,
    flattened_outer,
    is_good,
    read_header,
    read_snapshot,
    rounds,
)
from hypha_ray.texts import ranges
from hypha_ray.types import Commit, Entry, Flat, Layout, Span

log = logging.getLogger(__name__)

_NEWER = "STORE005"
_OURS = {
    "commits": re.compile(r"round_\d{6,}\.json|rewound"),
    "checkpoints": re.compile(r"round_\d{6,}"),
}


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """State of a run after a commit."""

    directory: Path
    next_round: int
    theta: dict[str, Array]
    """θ by tensor name."""
    outer: dict[str, Array]
    """Outer momentum by tensor name."""
    inner: dict[int, dict[str, Array]]
    """Saved inner states, by worker."""
    state: dict[str, Any]
    """State of the scheduler."""
    theta_sha256: str
    layout_sha256: str
    layout: Layout | None
    """Layout of the model; None if the snapshot doesn't contain it."""
    epoch: int
    """The oldest incomplete epoch."""
    used: list[list[int]]
    """Epoch, slice, start and stop of every committed span from that epoch on; see `Ledger.restore`."""
    skipped: tuple[str, ...]
    """Skipped records and snapshots with reasons, one line each."""

    def rewind(self) -> None:
        """Set the records of later rounds aside, so that the log ends at this state. Those rounds are trained again.

        Raises:
            TryAgainError: the disk is full or can't be written.

        """
        CommitLog(self.directory).set_aside(self.next_round)

    def outline(self) -> RestorePoint:
        """Copy without tensors; `inner` still has the workers' numbers."""
        return replace(self, theta={}, outer={}, inner={worker: {} for worker in self.inner})

    def flats(self, layout: Layout) -> list[Flat]:
        """Weights of fragment 0, 1, …, momentum of fragment 0, 1, …, and the workers' inner states, by number.

        Raises:
            CheckpointError: a tensor of the layout is missing or has another shape, so the model is another one.

        """
        for entry in layout.entries:
            tensor = self.theta.get(entry.name)
            if tensor is None or tensor.shape != entry.shape:
                problem = f"the checkpoint in {self.directory} is of another model: {entry.name} differs"
                saved_text = "no such" if tensor is None else f"shape {tensor.shape}"
                raise CheckpointError("STORE013", problem, f"shape {entry.shape}", saved_text)
        theta = flattened(layout, self.theta)
        outer = flattened_outer(layout, self.outer)
        inner = [self.inner[worker] for worker in sorted(self.inner)]
        return [*theta, *outer, *inner]


def restart(directory: Path) -> RestorePoint | None:
    """Read a run directory, and remove temporary files of a crash. The caller must hold the store's lock.

    Returns:
        The state to resume from; None if the run has no commit, and unusable records are then set aside.

    Raises:
        CheckpointError: no snapshot is usable, a record before the newest one is damaged or missing, or newer code
            wrote a snapshot.

    """
    for folder in _OURS:
        sweep(directory / folder)
    commits, damaged = _read_chain(CommitLog(directory))
    if not commits or _is_half_begun(directory, commits):
        _set_all_aside(directory, damaged)
        return None
    return _newest_usable(directory, commits, (*damaged, *_unknown_files(directory)))


def usable_rounds(directory: Path, verify: bool = False) -> int:
    """Number of rounds after which a restart goes on; 0 if it has to begin anew, or can't.

    To verify the snapshots' files as well takes as long as to load them.
    """
    log = CommitLog(directory)
    complete = set(log.rounds()) & set(rounds(directory))
    for round in sorted(complete, reverse=True):
        with suppress(CheckpointError):
            _require_agreement(directory, log.load(round))
            if not verify or is_good(directory, round):
                return round + 1
    return 0


def _read_chain(log: CommitLog) -> tuple[list[Commit], list[str]]:
    """Commits of the chain, and warnings; the newest record counts as absent if it is damaged."""
    present_rounds = log.rounds()
    commits = [log.load(round) for round in present_rounds[:-1]]
    damaged = []
    if present_rounds:
        try:
            commits.append(log.load(present_rounds[-1]))
        except CheckpointError:
            damaged.append(f"commit round {present_rounds[-1] + 1}: its record is damaged and counts as absent")
    check_chain(commits)
    return commits, damaged


def _is_half_begun(directory: Path, commits: Sequence[Commit]) -> bool:
    """Whether the first snapshot was written late, and a crash prevented the records that waited for it."""
    snapshot_rounds = rounds(directory)
    headers = [read_header(directory, round) for round in snapshot_rounds]
    if min(snapshot_rounds, default=0) < len(commits):
        return False
    return any(header and not header.state.get("records") for header in headers)


def _set_all_aside(directory: Path, damaged: Sequence[str]) -> None:
    """Set all records aside, to begin with round 0."""
    for line in damaged:
        log.warning("%s", line)
    if CommitLog(directory).rounds():
        log.warning("%s has nothing to go on from, so the run starts anew", directory)
        CommitLog(directory).set_aside(0)


def _newest_usable(directory: Path, commits: Sequence[Commit], skipped: Sequence[str]) -> RestorePoint:
    snapshot_rounds = set(rounds(directory))
    problems = []
    for commit in reversed(commits):
        if commit.round not in snapshot_rounds:
            continue
        try:
            _require_agreement(directory, commit)
            snapshot = read_snapshot(directory, commit.round)
        except CheckpointError as error:
            if error.code == _NEWER:
                raise
            problems.append(error.what)
            continue
        gaps = (*problems, *_missing_snapshots(commits, commit, snapshot_rounds))
        lines = [f"{line}; using round {commit.round + 1}" for line in gaps]
        return _restore_point(directory, commits[: commit.round + 1], snapshot, (*skipped, *lines))
    got = "; ".join(problems) or "none at all"
    fix = "restore one, or start anew"
    raise CheckpointError("STORE006", f"none of the checkpoints in {directory} can be used", got=got, fix=fix)


def _missing_snapshots(commits: Sequence[Commit], restart_commit: Commit, present_rounds: set[int]) -> list[str]:
    """Warning about later rounds without a snapshot, if there are any."""
    later_commits = commits[restart_commit.round + 1 :]
    missing = [commit.round + 1 for commit in later_commits if commit.round not in present_rounds]
    if not missing:
        return []
    numbers_text = ", ".join(ranges(missing))
    return [f"commit round {numbers_text}: no checkpoint"]


def _require_agreement(directory: Path, commit: Commit) -> None:
    """Refuse a snapshot whose header has other hashes than the commit record."""
    header = read_header(directory, commit.round)
    if header is not None and header.hashes != (commit.theta_sha256, commit.outer_sha256):
        problem = f"checkpoint round {commit.round + 1}: it isn't the one that the commit names"
        raise CheckpointError("STORE004", problem)


def _restore_point(
    directory: Path, commits: Sequence[Commit], snapshot: Snapshot, skipped: tuple[str, ...]
) -> RestorePoint:
    last_commit = commits[-1]
    spans: list[Span] = []
    for commit in commits:
        for _, worker_spans in commit.spans:
            spans += [span for span in worker_spans if span.epoch >= last_commit.epoch]
    return RestorePoint(
        directory=directory,
        next_round=last_commit.round + 1,
        theta=snapshot.tensors,
        outer=snapshot.outer,
        inner=snapshot.inner,
        state=snapshot.state.get("scheduler", {}),
        theta_sha256=last_commit.theta_sha256,
        layout_sha256=snapshot.state["layout_sha256"],
        layout=saved_layout(snapshot.state),
        epoch=last_commit.epoch,
        used=[[span.epoch, span.slice, span.start, span.stop] for span in sorted(spans)],
        skipped=skipped,
    )


def saved_layout(state: Mapping[str, Any]) -> Layout | None:
    """Return the layout in a snapshot's state; None if a release with other layouts has written it."""
    entries = []
    for name, dtype, shape, *position in state.get("entries", ()):
        entries.append(Entry(name, dtype, tuple(shape), *position))
    tied = tuple((alias, name) for alias, name in state["tied"])
    layout = Layout(tuple(entries), tied, state["fragments"], state.get("frozen_sha256"))
    if layout.sha256() != state["layout_sha256"]:
        return None
    return layout


def newest_layout(directory: Path) -> Layout | None:
    """Return the layout of a run's model by its newest snapshot with a readable header; None without one."""
    for round in reversed(rounds(directory)):
        header = read_header(directory, round)
        if header is not None:
            return saved_layout(header.state)
    return None


def _unknown_files(directory: Path) -> list[str]:
    """Warnings about unknown files, one line each."""
    warnings = []
    for folder, pattern in _OURS.items():
        for path in sorted((directory / folder).glob("*")):
            if not pattern.fullmatch(path.name):
                warnings.append(f"{folder}/{path.name}: none of ours, left alone")
    return warnings
