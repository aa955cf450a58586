"""Summary of a job, a line for each subject; a line is left out if it means nothing for the job, or isn't known.

The only measure of the time that a job will take is the pace of an earlier run of the same work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray.config import Job
from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.driver.summary.earlier_runs import Pace, generator_facts, pace_of_earlier_run, pace_of_run
from hypha_ray.driver.summary.facts import data_text, model_text, rounds_text
from hypha_ray.driver.summary.sizes import DiskSizes, Exchange, disk_sizes, exchange_of, free_bytes
from hypha_ray.heavy_imports import uncollected
from hypha_ray.market.requirements import NodeResources
from hypha_ray.store.directory import RunDirectory, runs
from hypha_ray.store.snapshots import SnapshotHeader, read_header, snapshot_path
from hypha_ray.store.snapshots import rounds as snapshot_rounds
from hypha_ray.telemetry.sinks.files import METRICS, Record, by_round, read_jsonl
from hypha_ray.telemetry.sinks.table import duration, si
from hypha_ray.texts import counted
from hypha_ray.types.data import is_trained

if TYPE_CHECKING:
    from hypha_ray.driver.preflight.compatibility import Case


SUBJECT_WIDTH = 10
"""Width of the column of subjects in characters."""


def exchange_text(job: Job, exchange: Exchange) -> str:
    """Describe the traffic of all workers together."""
    about = "at most " if exchange.is_bound else ""
    if exchange.is_estimated:
        about += "about "
    up = f"{_range(exchange.up)} up"
    down = f"{_range(exchange.down)} down"
    total = f"{size_text(exchange.total_up)} and {size_text(exchange.total_down)} in all"
    if job.rounds.max_exchange_share is not None:
        total = f"at most {total}"
    codecs = f"{job.sync.codec} up, {job.sync.downward_codec} down"
    if job.sync.codec == job.sync.downward_codec:
        codecs = job.sync.codec
    return f"{about}{up} and {down} a round, {total} ({counted(job.num_workers, 'worker')}, {codecs})"


def disk_text(job: Job, use: DiskSizes) -> str:
    """Describe the space that a run takes and the space that is free."""
    about = "about"
    if use.is_bound:
        about = "at least"
    snapshots = f"{counted(use.snapshots, 'snapshot')} of {size_text(use.snapshot)}"
    models = f"{counted(use.models, 'model')} of {size_text(use.model)}"
    text = f"{about} {size_text(use.in_the_end)} beside logs, plots and records: {snapshots}, {models}"
    folder = runs(job.run.dir)
    text += f"; {size_text(free_bytes(folder))} free in {folder}"
    mirror = job.checkpoint.mirror
    if mirror is not None:
        text += "; as much again at checkpoint.mirror"
    return text


def space_notes(job: Job, use: DiskSizes) -> Iterator[str]:
    """Warn of a disk that a run will fill."""
    places = {"run.dir": runs(job.run.dir)}
    mirror = job.checkpoint.mirror
    if mirror is not None and "://" not in mirror:
        places["checkpoint.mirror"] = Path(mirror)
    for key, folder in places.items():
        free = free_bytes(folder)
        if free < use.at_most:
            problem = f"the run takes up to {size_text(use.at_most)} in {folder}, and {size_text(free)} are free"
            yield f"{problem}: make room, choose another {key}, or keep fewer snapshots by checkpoint.keep"


def _range(rounds: Counter[int]) -> str:
    """Write the bytes of a round, or the least and the most of them if rounds differ."""
    least = size_text(min(rounds))
    most = size_text(max(rounds))
    if least == most:
        return most
    return f"{least} to {most}"


def size_text(size: int) -> str:
    """Write a number of bytes: 999 B, 1.23 kB, 45.6 MB."""
    text = si(size)
    if text[-1].isdigit():
        return f"{text} B"
    return f"{text[:-1]} {text[-1]}B"


@dataclass(frozen=True, slots=True)
class JobReport:
    """Facts about a job by subject, in order, and warnings that follow from them."""

    facts: list[tuple[str, str]]
    """Subject, such as ``model``, and text."""
    warnings: list[str]

    def text(self) -> str:
        """Write a line for each fact."""
        lines: list[str] = []
        for subject, text in self.facts:
            lines.append(f"{subject.ljust(SUBJECT_WIDTH)} {text}")
        return "\n".join(lines)


def summary_of_new(
    job: Job,
    source: DataSource | None,
    case: Case | None,
    nodes: Sequence[NodeResources],
    price: float | None,
    with_memory: bool,
) -> JobReport:
    """Summarize a job that begins; a partial one has fewer facts.

    Args:
        job: the job file.
        source: its dataset; None: it has none.
        case: its model on the dataset; None: it lacks one of them.
        nodes: nodes of the cluster.
        price: price of all machines per hour; None: they have none.
        with_memory: whether to estimate the memory of a training step, which takes two steps without values.

    """
    if case is None and source is None:
        return JobReport([("rounds", rounds_text(job))], [])
    if case is None:
        assert source is not None
        return JobReport([("data", data_text(job, source)), ("rounds", rounds_text(job, source.manifest))], [])
    summary = _of_case(case)
    with uncollected():
        from hypha_ray.driver.preflight.notes import step_notes

    notes = step_notes(case, nodes, with_memory)
    for text in notes.memory:
        summary.facts.append(("memory", text))
    for text in notes.settings:
        summary.facts.append(("settings", text))
    summary.facts.extend(generator_facts(job, case.manifest))
    summary.facts.extend(_time_facts(job, pace_of_earlier_run(job, case.manifest), price))
    summary.warnings.extend(notes.warnings)
    return summary


def summary_of_resumed(job: Job, source: DataSource, directory: RunDirectory, price: float | None) -> JobReport:
    """Summarize a run that goes on, by its own records; libraries of models aren't loaded for it.

    Args:
        job: the job file.
        source: its dataset.
        directory: directory of the run.
        price: price of all machines per hour; None: they have none.

    """
    records = by_round(read_jsonl(directory.path / METRICS, ("round",)), "round")
    facts: list[tuple[str, str]] = []
    snapshots = snapshot_rounds(directory.path)
    newest = None
    if snapshots:
        newest = read_header(directory.path, snapshots[-1])
    if newest is not None:
        facts.extend(_of_model(newest))
    facts.append(("data", data_text(job, source)))
    facts.append(("rounds", rounds_text(job, source.manifest, done=len(records))))
    if records:
        facts.extend(_of_records(records))
    if newest is not None:
        facts.extend(_of_snapshots(directory, snapshots))
    pace = pace_of_run(directory.path, job.num_workers) or pace_of_earlier_run(job, source.manifest)
    facts.extend(_time_facts(job, pace, price, done=len(records)))
    return JobReport(facts, [])


def _of_case(case: Case) -> JobReport:
    """Summarize model, data, rounds, traffic and disk."""
    with uncollected():
        from hypha_ray.model.layout import layout_of

    job = case.job
    layout = layout_of(case.modules, job.sync.fragments, job.sync.partition)
    use = disk_sizes(case, layout)
    facts = [
        ("model", model_text(case.modules, layout)),
        ("data", data_text(job, case.source)),
        ("rounds", rounds_text(job, case.manifest)),
        ("exchange", exchange_text(job, exchange_of(job, layout))),
        ("disk", disk_text(job, use)),
    ]
    return JobReport(facts, list(space_notes(job, use)))


def _of_model(snapshot: SnapshotHeader) -> Iterator[tuple[str, str]]:
    """Facts about the model of a run, by the layout in a snapshot."""
    trained = 0
    for *_, group, _, size in snapshot.state.get("entries", []):
        if is_trained(group):
            trained += size
    if trained:
        yield "model", f"{trained:,} parameters are trained"


def _of_snapshots(directory: RunDirectory, rounds: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Facts about the snapshots of a run, which it has of these rounds."""
    size = 0
    for file in snapshot_path(directory.path, rounds[-1]).iterdir():
        size += file.stat().st_size
    free = size_text(free_bytes(directory.path))
    count = counted(len(rounds), "snapshot")
    yield "disk", f"{count}, the newest of {size_text(size)}; {free} free in {directory.path.parent}"


def _of_records(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Facts about the traffic of the rounds so far."""
    total_up = 0
    total_down = 0
    up = 0
    down = 0
    for record in records:
        up = record.get("bytes_up") or 0
        down = record.get("bytes_down") or 0
        total_up += up
        total_down += down
    newest = f"{size_text(up)} up and {size_text(down)} down in the newest round"
    total = f"{size_text(total_up)} and {size_text(total_down)} so far"
    yield "exchange", f"{newest}, {total}"


def _time_facts(job: Job, pace: Pace | None, price: float | None, done: int = 0) -> Iterator[tuple[str, str]]:
    """Facts about time and cost, or how to measure them.

    Args:
        job: the job file.
        pace: measured pace of the same work; None: there is none.
        price: price of all machines per hour; None: they have none.
        done: number of committed rounds.

    """
    if pace is None or job.rounds.max_exchange_share is not None:
        text = "not measured yet: --rounds.update_rounds 2 shows the pace"
        if job.rounds.max_exchange_share is not None:
            text = "unknown, as rounds grow by the time of their exchanges"
        yield "time", text
        if price is not None:
            yield "cost", f"{price:.2f} an hour"
        yield from _goal_facts(job)
        return
    rounds = max(0, job.rounds.update_rounds - done)
    time_s = rounds * pace.round_s
    rest = ""
    if done:
        rest = " for the rest"
    measured = f"{duration(pace.round_s)} a round, the median of {counted(pace.rounds, 'round')} of run {pace.run}"
    if pace.devices:
        measured += f" on {', '.join(pace.devices)}"
    yield "time", f"about {duration(time_s)}{rest}: {measured}"
    if price is not None:
        cost = price * time_s / 3600
        yield "cost", f"about {cost:.2f}{rest}, at {price:.2f} an hour"
    yield from _goal_facts(job, time_s)


def _goal_facts(job: Job, time_s: float | None = None) -> Iterator[tuple[str, str]]:
    """Deadline and budget; the deadline beside the time on all machines, in seconds, if that is known."""
    parts = []
    by_s = job.goal.by_s
    if by_s is not None:
        text = f"done {job.goal.by} after the first start"
        if time_s is not None and time_s > by_s:
            text += f", which is {duration(time_s - by_s)} too early for that pace"
        parts.append(text)
    if job.goal.at_most is not None:
        parts.append(f"at most {job.goal.at_most:g} for all leases")
    if parts:
        yield "goal", "; ".join(parts)
