"""State and figures of runs, read from their directories without a call to the runs.

A run is a folder with the job file that its start has written. Its state is

    running       a driver holds the run's lock: it trains, or saves the results
    finished      all rounds are committed, or the run ended early, and the model is saved
    failed        the last start ended with an error
    interrupted   none of these: the run was stopped, or its process was killed
    damaged       the job file can't be read
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from hypha_ray.config.load import CONFIG, PROVENANCE
from hypha_ray.errors import DataError, reason_of
from hypha_ray.figures import LOSS, OBJECTIVES, objective_of
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.directory import LOCK, RunDirectory, holder_of
from hypha_ray.telemetry.series import ended_early, recorded_summary
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, Record, newest_records, read_json, read_jsonl
from hypha_ray.telemetry.sinks.table import ABSENT, duration
from hypha_ray.texts import fixed, printable

MODEL = "model"
"""Name of the folder with the model in a run's directory."""
_GROWING = (METRICS, EVENTS, CONFIG)
"""Files whose time is that of the run's last sign of life."""
RECORD_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RecursionError)
"""Errors that records lead to which hypha_ray hasn't written."""
TITLES = ("run", "state", "round", "objective", "age", "workers", "cost")
_TAGS = "tags"
"""Title of the last column, which is there if any of the runs has a tag."""


@contextmanager
def readable(subject: object) -> Iterator[None]:
    """Turn what the files of a run lead to into errors for users.

    Args:
        subject: directory of the run, or a text for one of several runs.

    Raises:
        DataError: DATA044, a file can't be read, or has a record of another program.

    """
    try:
        yield
    except OSError as error:
        got = f"{error.filename or subject}: {error.strerror}"
        raise DataError("DATA044", f"the files of {subject} can't be read", got, fix="see to it") from None
    except RECORD_ERRORS as error:
        problem = f"{subject} has a record that can't be understood"
        raise DataError("DATA044", problem, reason_of(error), fix="take away what hypha_ray didn't write") from None


class State(StrEnum):
    """State of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A line about a run."""

    folder: Path
    state: State
    error: str | None
    """Error that ended the last start; None if it didn't end with one."""
    rounds: int
    """Number of committed rounds."""
    total_rounds: int | None
    """Number of rounds of the job; None if it isn't known."""
    objective: str
    """Name of the figure by which the weights are compared."""
    value: float | None
    """Figure of the last evaluation, otherwise of the last round; None without one."""
    workers: int | None
    """Number of workers in the last round; None before its end."""
    cost: float | None
    """Cost of all leases so far; None without prices."""
    written_s: float
    """Time of the last record, in seconds since 1970."""
    tags: tuple[str, ...] = ()
    """Tags of the job file."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.folder.name

    def as_json(self) -> dict[str, Any]:
        """The fields with JSON's types; the time of the last record is one of ISO 8601, in UTC."""
        written_at = datetime.fromtimestamp(self.written_s, UTC)
        return {
            "name": self.name,
            "folder": str(self.folder),
            "state": str(self.state),
            "error": self.error,
            "rounds": self.rounds,
            "total_rounds": self.total_rounds,
            "objective": self.objective,
            "value": self.value,
            "workers": self.workers,
            "cost": self.cost,
            "last_record": written_at.isoformat(timespec="seconds"),
            "tags": list(self.tags),
        }


def overviews(parent: Path) -> tuple[list[RunOverview], list[Path]]:
    """Return the runs of a folder, the one with the newest record first, and the folders that can't be read.

    Folders without a job file are no runs.
    """
    run_overviews: list[RunOverview] = []
    unreadable: list[Path] = []
    for folder in sorted(parent.glob("*")):
        try:
            if RunDirectory(folder).begun:
                run_overviews.append(overview(folder))
        except (OSError, *RECORD_ERRORS):
            unreadable.append(folder)
    run_overviews.sort(key=lambda run: run.written_s, reverse=True)
    return run_overviews, unreadable


def overview(folder: Path) -> RunOverview:
    """Return the line about a run.

    Raises:
        OSError: a file of the run can't be read.

    """
    tables = read_tables(folder)
    latest_records = newest_records(folder / METRICS, ("round", "eval"))
    last_round = latest_records.get("round", {})
    figures = recorded_summary(folder)
    if figures is None:
        events = read_jsonl(folder / EVENTS, ("attempt", "stop", "cost"))
        figures = {"ended_early": ended_early(events), "cost": cost_of(events)}
    rounds = committed_rounds(folder)
    total_rounds = total_of(tables or {}, last_round)
    state = State.DAMAGED
    if tables is not None:
        state = state_of(folder, rounds, total_rounds, figures["ended_early"])
    objective, value = objective_value(latest_records.get("eval"), last_round)
    workers = last_round.get("workers")
    if workers is not None:
        workers = int(workers)
    return RunOverview(
        folder=folder,
        state=state,
        error=error_of(folder),
        rounds=rounds,
        total_rounds=total_rounds,
        objective=objective,
        value=value,
        workers=workers,
        cost=figures["cost"],
        written_s=_written_s(folder),
        tags=tags_of(tables or {}),
    )


def read_tables(folder: Path) -> dict[str, Any] | None:
    """The tables of a run's job file; None if it is damaged or has none.

    Raises:
        OSError: the file can't be read.

    """
    try:
        return tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")) or None
    except ValueError:
        return None


def tags_of(tables: Mapping[str, Any]) -> tuple[str, ...]:
    """Tags of a run, by the tables of its job file."""
    return tuple(tables.get("run", {}).get("tags", ()))


def committed_rounds(folder: Path) -> int:
    """Number of committed rounds."""
    return max(CommitLog(folder).rounds(), default=-1) + 1


def progress_of(committed_rounds: int, total_rounds: int | None, recorded_rounds: int) -> str:
    """Return a text about a run's rounds: the committed ones, and those with figures if they are more."""
    text = f"{committed_rounds} of {text_of(total_rounds, absent='?')} rounds"
    if recorded_rounds > committed_rounds:
        text += f", figures of {recorded_rounds}"
    return text


def total_of(tables: Mapping[str, Any], last_round: Record) -> int | None:
    """Number of rounds of a job: that of its file, otherwise that of the run's last record; None if neither has it.

    The last record doesn't have it, either, if the run had used its samples and has more epochs since.
    """
    rounds = tables.get("rounds", {})
    total = rounds.get("update_rounds")
    if isinstance(total, int):
        return total
    epochs = rounds.get("epochs")
    is_mixture = bool(tables.get("dataset", {}).get("mix"))
    was_over = last_round.get("rounds") == last_round.get("round", 0) + 1
    if epochs is not None and was_over and not is_mixture and last_round.get("epoch", 0) < epochs:
        return None
    return last_round.get("rounds")


def state_of(folder: Path, rounds: int, total_rounds: int | None, early_end: str | None) -> State:
    """Return the state of a run.

    Args:
        folder: directory of the run.
        rounds: number of committed rounds.
        total_rounds: number of rounds of the job; None: unknown.
        early_end: reason for which the run ended before all rounds; None if it didn't.

    Raises:
        OSError: the lock can't be read.

    """
    if holder_of(folder / LOCK) is not None:
        return State.RUNNING
    return state_at_rest(folder, rounds, total_rounds, early_end)


def state_at_rest(folder: Path, rounds: int, total_rounds: int | None, early_end: str | None) -> State:
    """Return the state of a run whose lock is free, or held by the caller; arguments are those of `state_of`."""
    if error_of(folder) is not None:
        return State.FAILED
    is_complete = total_rounds is not None and rounds >= total_rounds
    if (is_complete or early_end is not None) and (folder / MODEL).is_dir():
        return State.FINISHED
    return State.INTERRUPTED


def error_of(folder: Path) -> str | None:
    """Error that ended the last start of a run; None if it goes on, was stopped, or ended well."""
    error: str | None = read_json(folder / PROVENANCE).get("error")
    return error


def objective_value(evaluation: Record | None, last_round: Record) -> tuple[str, float | None]:
    """Name and value of the figure by which weights are compared: of an evaluation, otherwise of a round."""
    if evaluation is not None:
        objective = objective_of([evaluation])
        return objective.validated, _float(evaluation.get(objective.name))
    for objective in OBJECTIVES:
        if last_round.get(objective.trained) is not None:
            return objective.trained, _float(last_round[objective.trained])
    return LOSS.trained, None


def _float(value: float | None) -> float | None:
    if value is None:
        return None
    return float(value)


def cost_of(events: Iterable[Record]) -> float | None:
    """Cost of all leases; None without prices."""
    costs = [float(event["cost"]) for event in events if event.get("kind") == "cost"]
    if not costs:
        return None
    return sum(costs)


def _written_s(folder: Path) -> float:
    times = [0.0]
    for name in _GROWING:
        with suppress(FileNotFoundError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def listing(runs: Sequence[RunOverview], now_s: float) -> Iterator[tuple[str, ...]]:
    """Return a row of texts with titles, and one for each run; the age is the time since the run's last record.

    `now_s` is the time in seconds since 1970.
    """
    has_tags = any(run.tags for run in runs)
    yield (*TITLES, _TAGS) if has_tags else TITLES
    for run in runs:
        row = _row(run, now_s)
        yield (*row, ", ".join(run.tags)) if has_tags else row


def _row(run: RunOverview, now_s: float) -> tuple[str, ...]:
    progress_text = f"{run.rounds}/{text_of(run.total_rounds, '', '?')}"
    value_text = ABSENT
    if run.value is not None:
        value_text = f"{run.objective} {fixed(run.value, 4)}"
    age_s = max(0.0, now_s - run.written_s)
    return (
        run.name,
        run.state,
        progress_text,
        value_text,
        duration(age_s),
        text_of(run.workers),
        text_of(run.cost, ".4g"),
    )


def text_of(value: float | None, format: str = "", absent: str = ABSENT) -> str:
    """Write a figure in a format; `absent` stands for one that the run lacks."""
    if value is None:
        return absent
    return f"{value:{format}}"


def aligned(table: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Write rows as lines with aligned columns; control characters become spaces."""
    texts = [tuple(map(printable, row)) for row in table]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()
