"""Account of one run in about ten lines: state, training, results, cost, and the command that goes on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hypha_ray.config.load import PROVENANCE
from hypha_ray.figures import OBJECTIVES, objective_of, shown_beside
from hypha_ray.files import as_installed, jobs_folder
from hypha_ray.history.overview import (
    MODEL,
    State,
    committed_rounds,
    error_of,
    progress_of,
    read_tables,
    readable,
    state_of,
    tags_of,
    total_of,
)
from hypha_ray.store.directory import LOCK, holder_of, home
from hypha_ray.telemetry.series import model_name, recorded_summary, summary
from hypha_ray.telemetry.sinks.files import (
    EVENTS,
    METRICS,
    SUMMARY,
    Record,
    by_round,
    kinds_to_read,
    read_json,
    read_jsonl,
    records_in_turn,
)
from hypha_ray.telemetry.sinks.table import duration, si
from hypha_ray.texts import counted, fixed, printable

_KINDS = ("round", "eval")
"""Kinds of records that the account needs."""
_EVENTS = ("attempt", "stop", "loss", "quarantine", "cost", "fleet_time")
"""Kinds of events that the account needs."""
_RESUMING = frozenset({"diloco", "sync", "grpo", "ppo", "dpo"})
"""Jobs that can resume a run."""


@dataclass(frozen=True)
class RunFiles:
    """Contents of the files of a run."""

    folder: Path
    tables: Mapping[str, Any]
    """Tables of the job file; none if it is damaged."""
    provenance: Record
    """Account of the last start; without fields if there is none."""
    metrics: Sequence[Record]
    """Records of rounds and evaluations; of workers' reports too if they are read."""
    events: Sequence[Record]
    summary: Record | None = None
    """Content of summary.json, if these are not all records, but those that `first_and_last` finds; otherwise None."""

    @classmethod
    def read(cls, folder: Path) -> RunFiles:
        """Read the files of a run, with the events that its account needs; no more than the summary leaves open.

        Raises:
            OSError: a file can't be read.

        """
        figures = recorded_summary(folder)
        if figures is None:
            return cls._read(folder, _KINDS, _EVENTS)
        metrics = list(first_and_last(folder / METRICS, figures))
        return cls(folder, read_tables(folder) or {}, read_json(folder / PROVENANCE), metrics, (), figures)

    @classmethod
    def read_all(cls, folder: Path) -> RunFiles:
        """Read the files of a run with all events, and with the reports of its workers unless they are very many.

        Raises:
            OSError: a file can't be read.

        """
        return cls._read(folder, kinds_to_read(folder / METRICS), None)

    @classmethod
    def _read(cls, folder: Path, kinds: Sequence[str], event_kinds: Sequence[str] | None) -> RunFiles:
        return cls(
            folder,
            read_tables(folder) or {},
            read_json(folder / PROVENANCE),
            read_jsonl(folder / METRICS, kinds),
            read_jsonl(folder / EVENTS, event_kinds),
        )

    def all_metrics(self) -> Sequence[Record]:
        """Return all records of rounds and evaluations.

        Raises:
            OSError: the file can't be read.

        """
        if self.summary is None:
            return self.metrics
        return read_jsonl(self.folder / METRICS, _KINDS)

    @cached_property
    def figures(self) -> Record:
        """Fields of the run's summary as far as it has come."""
        if self.summary is not None:
            return self.summary
        last_summary = read_json(self.folder / SUMMARY)
        return summary(self.metrics, self.events, last_summary.get("parameter_bytes"))

    @cached_property
    def rounds(self) -> list[Record]:
        """Records of the rounds, in order."""
        return by_round(self.metrics, "round")

    @cached_property
    def evaluations(self) -> list[Record]:
        """Records of the evaluations, in order."""
        return by_round(self.metrics, "eval")

    def value(self, table: str, key: str) -> Any:
        """Value of a key of the job file; None if it is missing or turned off."""
        value = self.tables.get(table, {}).get(key)
        if value == "none":
            return None
        return value

    @property
    def last_round(self) -> Record:
        """Record of the last round; without fields before the first."""
        if not self.rounds:
            return {}
        return self.rounds[-1]


def first_and_last(path: Path, figures: Record) -> Iterator[Record]:
    """Return the records of a long file that its run's account needs beside the figures of all: a few of both ends.

    These are the last round, and the first and last rounds and evaluations that have the run's objective.

    Args:
        path: metrics.jsonl.
        figures: summary of the whole file.

    Raises:
        OSError: the file can't be read.

    """
    first_round = next(records_in_turn(path, "round"), {})
    last_round = next(records_in_turn(path, "round", backwards=True), {})
    if not last_round:
        return
    yield last_round
    for objective in OBJECTIVES:
        if objective.trained in {*first_round, *last_round}:
            yield from _ends_of_curve(path, "round", objective.trained)
        if figures.get(f"best_{objective.name}") is not None:
            yield from _ends_of_curve(path, "eval", objective.name)


def _ends_of_curve(path: Path, kind: str, name: str) -> Iterator[Record]:
    """The first and the last record of a kind that has a figure; of a round that was trained again, its last record."""
    first_record: Record = {}
    for record in records_in_turn(path, kind):
        if first_record.get(name) is not None and record["round"] != first_record["round"]:
            break
        first_record = record
    yield first_record
    for record in records_in_turn(path, kind, backwards=True):
        if record.get(name) is not None:
            yield record
            break


def account_of(folder: Path) -> list[str]:
    """Return the lines about a run, a subject each; one whose figures the run lacks is left out.

    Raises:
        DataError: DATA044, a file can't be read, or has a record of another program.

    """
    with readable(folder):
        return list(_lines(RunFiles.read(folder)))


def _lines(run: RunFiles) -> Iterator[str]:
    rounds = committed_rounds(run.folder)
    total_rounds = total_of(run.tables, run.last_round)
    state = State.DAMAGED
    if run.tables:
        state = state_of(run.folder, rounds, total_rounds, run.figures["ended_early"])
    yield _line("run", f"{run.folder.name}, {run.folder}")
    progress = progress_of(rounds, total_rounds, run.figures["rounds"])
    yield _line("state", f"{state}, {progress}{reason_of_state(run, state)}")
    if run.tables:
        yield from _label_lines(run)
        yield _line("training", training_of(run))
    if run.rounds:
        yield from _figure_lines(run)
    cost = run.figures["cost"]
    if cost is not None:
        yield _line("cost", f"{cost:.4g}, in the owners' unit")
    model = run.folder / MODEL
    if model.is_dir():
        yield _line("model", str(model))
    if state is not State.DAMAGED:
        yield _line("go on", go_on(run, state, total_rounds))


def _label_lines(run: RunFiles) -> Iterator[str]:
    """Lines with the notes and the tags that the run has."""
    notes = run.value("run", "notes")
    if notes:
        yield _line("notes", " ".join(notes.split()))
    tags = tags_of(run.tables)
    if tags:
        yield _line("tags", ", ".join(tags))


def _figure_lines(run: RunFiles) -> Iterator[str]:
    figures = run.figures
    for objective in OBJECTIVES:
        values = _values(run.rounds, objective.trained)
        if values:
            yield _line(objective.trained, _arrow(values))
            break
    evaluations = _evaluations(run.evaluations, figures)
    if evaluations is not None:
        yield _line("evaluation", evaluations)
    yield _line("data", _data(run, figures))
    yield _line("workers", _workers(figures, run.last_round))
    yield _line("traffic", _traffic(figures))
    yield _line("time", _time(figures))


def _line(subject: str, text: str) -> str:
    return f"{subject:<11} {printable(text)}"


def reason_of_state(run: RunFiles, state: State) -> str:
    """Return why a run has failed or ended early, or the process that it runs in, after a colon; "" without one."""
    reason: object
    match state:
        case State.FAILED:
            reason = error_of(run.folder)
        case State.RUNNING:
            reason = holder_of(run.folder / LOCK) or "it has just ended"
        case _:
            reason = run.figures["ended_early"]
    if reason is None:
        return ""
    return f": {reason}"


def training_of(run: RunFiles) -> str:
    """Return the names of model, dataset and algorithm."""
    strategy = run.value("sync", "strategy")
    algorithm = run.value("rl", "algorithm")
    if algorithm is None:
        algorithm = run.value("preference", "loss")
    if algorithm is not None:
        strategy = f"{algorithm}, {strategy}"
    return f"{model_name(run.tables)} on {_dataset_name(run)}, by {strategy}"


def _dataset_name(run: RunFiles) -> str:
    name = run.value("dataset", "name")
    path = run.value("dataset", "path")
    prepared = run.provenance.get("dataset", {}).get("name")
    return str(name or path or prepared or "a mixture")


def _evaluations(evaluations: Sequence[Record], figures: Record) -> str | None:
    """Objective of the first evaluation, the last one and the best one, and the last one's further figures."""
    objective = objective_of(evaluations)
    measured_evaluations = [record for record in evaluations if record.get(objective.name) is not None]
    if not measured_evaluations:
        return None
    last_evaluation = measured_evaluations[-1]
    values = _values(measured_evaluations, objective.name)
    parts = [f"{objective.validated} {_arrow(values)}"]
    for name in shown_beside(objective, last_evaluation):
        value = last_evaluation[name]
        if value is not None:
            parts.append(f"{name} {value:.4g}")
    best_value = figures[f"best_{objective.name}"]
    best_round = figures["best_round"] + 1
    parts.append(f"best {fixed(best_value, 4)} after round {best_round}")
    return ", ".join(parts)


def _arrow(values: Sequence[float]) -> str:
    """The first value and the last one."""
    last_text = fixed(values[-1], 4)
    if len(values) == 1:
        return last_text
    return f"{fixed(values[0], 4)} → {last_text}"


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [float(record[name]) for record in records if record.get(name) is not None]


def _data(run: RunFiles, figures: Record) -> str:
    """Samples, tokens and epochs; the datasets of a mixture have epochs of their own, which aren't shown."""
    samples_text = si(figures["samples"])
    parts = [counted(samples_text, "sample")]
    if figures["tokens"]:
        tokens_text = si(figures["tokens"])
        parts.append(counted(tokens_text, "token"))
    samples_by_split = run.provenance.get("dataset", {}).get("samples", {})
    available = samples_by_split.get("train")
    total = run.last_round.get("samples_total")
    if available and total is not None and not run.value("dataset", "mix"):
        parts.append(f"{total / available:.2f} epochs of {si(available)} samples")
    return ", ".join(parts)


def _workers(figures: Record, last_round: Record) -> str:
    parts = []
    if last_round.get("workers") is not None:
        workers_text = counted(last_round["workers"], "worker")
        parts.append(f"{workers_text} in the last round")
    lost_workers = figures["workers_lost"]
    parts.append(f"{lost_workers} lost")
    deltas_text = counted(figures["rejected"], "delta")
    parts.append(f"{deltas_text} rejected")
    if figures["slices_quarantined"]:
        slices_text = counted(figures["slices_quarantined"], "damaged slice")
        parts.append(f"{slices_text} left out")
    return ", ".join(parts)


def _traffic(figures: Record) -> str:
    up_text = si(figures["bytes_up"])
    down_text = si(figures["bytes_down"])
    text = f"{up_text}B up, {down_text}B down"
    ratio = figures["traffic_ratio"]
    if ratio is not None:
        text += f", 1/{ratio:.0f} of a gradient exchange at every step"
    return text


def _time(figures: Record) -> str:
    seconds_text = duration(figures["seconds"])
    parts = [f"{seconds_text} of training"]
    for noun in ("samples", "tokens"):
        speed = figures[f"{noun}_per_s"]
        if speed:
            parts.append(f"{si(speed)} {noun}/s")
    idle_fraction = figures["idle_fraction"]
    if idle_fraction is not None:
        parts.append(f"workers idle for {idle_fraction:.1%}")
    return ", ".join(parts)


def go_on(run: RunFiles, state: State, total_rounds: int | None) -> str:
    """Return the command that goes on with a run, or that watches it while it runs."""
    target = shlex.quote(str(run.folder))
    if run.folder.parent == home():
        target = shlex.quote(run.folder.name)
    if state is State.RUNNING:
        return as_installed("python jobs/plot.py") + f" {target}     # draws the plots so far"
    job = as_installed(f"python jobs/{job_name(run.provenance)}.py")
    command = f"{job} --resume {target}"
    if state is not State.FINISHED:
        return command
    reason = run.figures["ended_early"]
    if reason is not None:
        at_most = run.value("goal", "at_most")
        if at_most is not None and reason.startswith("goal.at_most"):
            return f"{command} --goal.at_most {2 * at_most:g}"
        patience = run.value("rounds", "patience") or 1
        return f"{command} --rounds.patience {2 * patience}"
    epochs = run.value("rounds", "epochs")
    if epochs:
        return f"{command} --rounds.epochs {2 * epochs}"
    more_rounds = 2 * (total_rounds or 1)
    return f"{command} --rounds.update_rounds {more_rounds}"


def job_name(provenance: Record) -> str:
    """Name of the job that a run was started by, by the account of its start; a program's run is one of `diloco`."""
    for word in provenance.get("command") or ():
        name = Path(word).stem
        if name in _RESUMING and (jobs_folder() / f"{name}.py").is_file():
            return name
    return "diloco"
