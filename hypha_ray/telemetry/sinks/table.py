"""Rounds as rows of text: columns of the console, and short forms of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from hypha_ray.figures import LOSS, OBJECTIVES, Objective, objective_of, shown_beside, task_figures
from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.texts import counted, fixed, size_in_memory

ABSENT = "-"
OF_TOKENS = {"tokens", "tok/s"}
"""Titles of columns that are shown only if there are tokens."""


class Unit(NamedTuple):
    """A decimal multiple and its letter."""

    size: float
    letter: str


UNITS = (Unit(1, ""), Unit(1e3, "k"), Unit(1e6, "M"), Unit(1e9, "G"), Unit(1e12, "T"), Unit(1e15, "P"), Unit(1e18, "E"))


@dataclass(frozen=True, slots=True)
class ConsoleColumn:
    """A column: title, width in characters, and the text of its cell for a round.

    A narrow terminal shows the columns with the lowest ranks.
    """

    title: str
    width: int
    rank: int
    cell: Callable[[Record], str]


def si(value: float | None) -> str:
    """Shorten a count to at most five characters, and a rate below ten to three digits: 999, 1.23k, 45.6M, 0.31."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if abs(value) < 9.995 and value != round(value):
        return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2g}"
    for unit in UNITS:
        if abs(value) < 999.5 * unit.size:
            break
    if unit.size == 1:
        return f"{value:.0f}"
    digits = f"{value / unit.size:#.3g}"
    return digits.rstrip(".") + unit.letter


def duration(seconds: float | None) -> str:
    """Write a time in at most six characters: 4.2s, 2m05s, 1h07m, 3d04h."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{whole_seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def batches(counts: dict[Any, int] | None, width: int) -> str:
    """Write each worker's batches in worker order, 12/12/9, or the least and the most of them if that is too long."""
    if not counts:
        return ABSENT
    workers = sorted(counts, key=lambda worker: (len(str(worker)), str(worker)))
    ordered = [counts[worker] for worker in workers]
    text = "/".join(map(str, ordered))
    if len(text) > width:
        return f"{min(ordered)}..{max(ordered)}"
    return text


def _fixed(name: str, digits: int, scale: float = 1.0) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        value = record.get(name)
        return ABSENT if value is None else fixed(value * scale, digits)

    return cell


def progress(record: Record) -> str:
    """Write how many rounds are done and how many there are."""
    return f"{record['round'] + 1}/{record.get('rounds') or '?'}"


COLUMNS = (
    ConsoleColumn("round", 9, 0, progress),
    ConsoleColumn("time", 6, 1, lambda record: duration(record.get("time_s"))),
    ConsoleColumn("loss", 8, 0, _fixed("loss", 4)),
    ConsoleColumn("val_loss", 8, 2, _fixed("val_loss", 4)),
    ConsoleColumn("reward", 8, 0, _fixed("reward", 4)),
    ConsoleColumn("val_reward", 10, 2, _fixed("val_reward", 4)),
    ConsoleColumn("samples", 7, 11, lambda record: si(record.get("samples"))),
    ConsoleColumn("samples/s", 9, 5, lambda record: si(record.get("samples_per_s"))),
    ConsoleColumn("tokens", 6, 12, lambda record: si(record.get("tokens") or None)),
    ConsoleColumn("tok/s", 6, 4, lambda record: si(record.get("tokens_per_s") or None)),
    ConsoleColumn("MFU %", 6, 13, _fixed("mfu", 1, 100)),
    ConsoleColumn("workers", 7, 8, lambda record: str(record.get("workers", ABSENT))),
    ConsoleColumn("batches", 15, 6, lambda record: batches(record.get("batches"), 15)),
    ConsoleColumn("idle %", 6, 7, _fixed("idle_fraction", 1, 100)),
    ConsoleColumn("sync s", 6, 9, _fixed("sync_s", 2)),
    ConsoleColumn("MB up", 7, 10, _fixed("bytes_up", 1, 1e-6)),
    ConsoleColumn("ETA", 6, 3, lambda record: duration(record.get("eta_s"))),
)


def columns_for(records: Iterable[Record]) -> tuple[ConsoleColumn, ...]:
    """Return the columns that apply to these rounds, without empty ones and those of other objectives."""
    records = list(records)
    objective = _trained_objective(records)
    hidden: set[str] = set()
    for alternative in OBJECTIVES:
        if alternative is not objective:
            hidden |= {alternative.trained, alternative.validated}
    if not any(record.get("tokens") for record in records):
        hidden |= OF_TOKENS
    if not any(record.get("mfu") for record in records):
        hidden.add("MFU %")
    figures: dict[str, float] = {}
    for record in records:
        figures |= task_figures(record)
    columns = []
    for column in COLUMNS:
        if column.title not in hidden:
            columns.append(column)
        if column.title == objective.validated:
            columns += map(_task_column, figures)
    return tuple(columns)


def _trained_objective(records: Sequence[Record]) -> Objective:
    """First objective that a round has a figure of."""
    for objective in OBJECTIVES:
        if any(objective.trained in record for record in records):
            return objective
    return LOSS


@cache
def _task_column(name: str) -> ConsoleColumn:
    """Column of a figure that tells how well the task is done."""
    return ConsoleColumn(name, max(8, len(name)), 2, _fixed(name, 4))


def validated(evaluation: Record) -> dict[str, float]:
    """Return the objective of an evaluation and the figures of its task, by the titles of their columns."""
    objective = objective_of([evaluation])
    figures: dict[str, float] = {}
    value = evaluation.get(objective.name)
    if value is not None:
        figures[objective.validated] = value
    return figures | task_figures(evaluation)


def fitting(width: int, gap: int = 2, among: Iterable[ConsoleColumn] = COLUMNS) -> list[ConsoleColumn]:
    """Return the columns that fit into a terminal, without those of the highest ranks."""
    columns = list(among)
    needed = sum(column.width + gap for column in columns) - gap
    while len(columns) > 1 and needed > width:
        least_important = max(columns, key=lambda column: column.rank)
        columns.remove(least_important)
        needed -= least_important.width + gap
    return columns


def header(columns: Iterable[ConsoleColumn] = COLUMNS) -> str:
    """Return the line of titles."""
    return "  ".join(column.title.rjust(column.width) for column in columns)


def line(record: Record, columns: Iterable[ConsoleColumn] = COLUMNS) -> str:
    """Return a round as one line under `header`; the figure of `validated` may have been added to the record."""
    return "  ".join(column.cell(record).rjust(column.width) for column in columns)


def event_text(event: Record) -> str:
    """Write an event as text: its kind, then its other fields except times."""
    words = [str(event.get("kind", "event"))]
    for name, value in event.items():
        if name not in {"kind", "monotonic_s", "wall_time"}:
            words.append(f"{name}={value}")
    return " ".join(words)


def summary_line(figures: Record) -> str:
    """Write a run's summary as one line."""
    return "done: " + ", ".join(_summary_parts(figures))


def _summary_parts(figures: Record) -> Iterator[str]:
    rounds_text = counted(figures.get("rounds", 0), "round")
    yield f"{rounds_text} in {duration(figures.get('seconds'))}"
    yield from _work(figures)
    yield from _quality(figures)
    if figures.get("goodput") is not None:
        yield f"goodput {figures['goodput']:.3f}{_largest_losses(figures)}"
    megabytes = (figures.get("bytes_up") or 0) / 1e6
    yield f"{fixed(megabytes, 1)} MB up"
    ratio = figures.get("traffic_ratio")
    if ratio is not None:
        yield f"1/{ratio:.0f} of a gradient exchange at every step"
    workers = figures.get("workers_lost")
    if workers:
        yield f"{counted(workers, 'worker')} lost"
    peak_bytes = figures.get("peak_memory_bytes")
    if peak_bytes is not None:
        yield f"a worker's GPU memory up to {size_in_memory(peak_bytes)}"
    deltas = figures.get("rejected")
    if deltas:
        yield f"{counted(deltas, 'delta')} rejected"
    slices = figures.get("slices_quarantined")
    if slices:
        yield f"{counted(slices, 'damaged slice')} left out"
    losses = list(_losses(figures.get("sinks") or {}))
    if losses:
        yield f"records lost by sinks: {', '.join(losses)}"


def _largest_losses(figures: Record) -> str:
    """Write the two uses of time besides training that took the most, in brackets; empty if none took a percent."""
    shares = dict(figures.get("time_shares") or {})
    shares.pop("training", None)
    largest = sorted(shares, key=lambda kind: -shares[kind])[:2]
    parts: list[str] = []
    for use in largest:
        if shares[use] >= 0.01:
            parts.append(f"{use} {100 * shares[use]:.0f} %")
    return f" ({', '.join(parts)})" if parts else ""


def _work(figures: Record) -> Iterator[str]:
    """Samples and tokens; the speed is that of tokens, or of samples if there are no tokens."""
    samples_text = si(figures.get("samples"))
    tokens = figures.get("tokens")
    samples_per_s = figures.get("samples_per_s")
    if tokens:
        yield counted(samples_text, "sample")
        speed = si(figures.get("tokens_per_s")) + "/s"
        if figures.get("mfu") is not None:
            speed += f", MFU {fixed(figures['mfu'], 3)}"
        yield f"{counted(si(tokens), 'token')} ({speed})"
    elif samples_per_s is not None:
        yield f"{counted(samples_text, 'sample')} ({si(samples_per_s)}/s)"
    else:
        yield counted(samples_text, "sample")


def _quality(figures: Record) -> Iterator[str]:
    """Loss if that is the objective, and the last evaluation."""
    objective = objective_of([figures])
    if objective is LOSS and figures.get("loss") is not None:
        yield f"loss {fixed(figures['loss'], 4)}"
    value = figures.get(objective.name)
    if value is not None:
        text = f"{objective.validated} {fixed(value, 4)}"
        names = [name for name in shown_beside(objective, figures) if figures[name] is not None]
        if names:
            further_text = ", ".join(f"{name} {figures[name]:.4g}" for name in names)
            text += f" ({further_text})"
        yield text


def _losses(sinks: Record) -> Iterator[str]:
    for name, losses in sinks.items():
        count = losses["failed"] + losses["dropped"]
        if count:
            yield f"{name} {count}"
