"""Rounds as rows of text: columns of the console, and short forms of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from hypha_ray.figures import LOSS, OBJECTIVES, objective_of, shown_beside, task_figures
from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.texts import counted

ABSENT = "-"


class Unit(NamedTuple):
    """A decimal multiple and its letter."""

    size: float
    letter: str


UNITS = (Unit(1, ""), Unit(1e3, "k"), Unit(1e6, "M"), Unit(1e9, "G"), Unit(1e12, "T"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column: title, width in characters, and the text of its cell for a round.

    A narrow terminal shows the columns with the lowest ranks.
    """

    title: str
    width: int
    rank: int
    cell: Callable[[Record], str]


def si(value: float | None) -> str:
    """Shorten a count to at most five characters: 999, 1.23k, 45.6M."""
    if value is None or not math.isfinite(value):
        return ABSENT
    unit = next(unit for unit in UNITS if abs(value) < 999.5 * unit.size or unit is UNITS[-1])
    return f"{value:.0f}" if unit.size == 1 else f"{value / unit.size:#.3g}".rstrip(".") + unit.letter


def duration(seconds: float | None) -> str:
    """Write a time in at most six characters: 4.2s, 2m05s, 1h07m, 3d04h."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def batches(counts: dict[Any, int] | None, width: int) -> str:
    """Write each worker's batches in worker order, 12/12/9, or the least and the most of them if that is too long."""
    if not counts:
        return ABSENT
    ordered = [counts[worker] for worker in sorted(counts, key=lambda worker: (len(str(worker)), str(worker)))]
    text = "/".join(map(str, ordered))
    return text if len(text) <= width else f"{min(ordered)}..{max(ordered)}"


def _fixed(name: str, digits: int, scale: float = 1.0) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        value = record.get(name)
        return ABSENT if value is None else f"{value * scale:.{digits}f}"

    return cell


def progress(record: Record) -> str:
    """Write how many rounds are done and how many there are."""
    return f"{record['round'] + 1}/{record.get('rounds') or '?'}"


COLUMNS = (
    Column("round", 9, 0, progress),
    Column("time", 6, 1, lambda record: duration(record.get("time_s"))),
    Column("loss", 8, 0, _fixed("loss", 4)),
    Column("val_loss", 8, 2, _fixed("val_loss", 4)),
    Column("reward", 8, 0, _fixed("reward", 4)),
    Column("val_reward", 10, 2, _fixed("val_reward", 4)),
    Column("samples", 7, 11, lambda record: si(record.get("samples"))),
    Column("samples/s", 9, 5, lambda record: si(record.get("samples_per_s"))),
    Column("tokens", 6, 12, lambda record: si(record.get("tokens") or None)),
    Column("tok/s", 6, 4, lambda record: si(record.get("tokens_per_s") or None)),
    Column("MFU %", 6, 13, _fixed("mfu", 1, 100)),
    Column("workers", 7, 8, lambda record: str(record.get("workers", ABSENT))),
    Column("batches", 15, 6, lambda record: batches(record.get("batches"), 15)),
    Column("idle %", 6, 7, _fixed("idle_fraction", 1, 100)),
    Column("sync s", 6, 9, _fixed("sync_s", 2)),
    Column("MB up", 7, 10, _fixed("bytes_up", 1, 1e-6)),
    Column("ETA", 6, 3, lambda record: duration(record.get("eta_s"))),
)


OF_TOKENS = {"tokens", "tok/s"}
"""Titles of columns that are shown only if there are tokens."""


def telling(records: Iterable[Record]) -> tuple[Column, ...]:
    """Return the columns that apply to these rounds; those of tokens and of other objectives may not."""
    records = list(records)
    objective = next((one for one in OBJECTIVES if any(one.trained in record for record in records)), LOSS)
    hidden = {title for one in OBJECTIVES if one is not objective for title in (one.trained, one.validated)}
    if not any(record.get("tokens") for record in records):
        hidden |= OF_TOKENS
    if not any(record.get("mfu") for record in records):
        hidden.add("MFU %")
    columns = [column for column in COLUMNS if column.title not in hidden]
    names = dict.fromkeys(name for record in records for name in task_figures(record))
    behind = 1 + next(place for place, column in enumerate(columns) if column.title == objective.validated)
    columns[behind:behind] = map(_of_task, names)
    return tuple(columns)


@cache
def _of_task(name: str) -> Column:
    """Column of a figure that tells how well the task is done."""
    return Column(name, max(8, len(name)), 2, _fixed(name, 4))


def validated(evaluation: Record) -> dict[str, float]:
    """Return the objective of an evaluation and the figures of its task, by the titles of their columns."""
    objective = objective_of([evaluation])
    value = evaluation.get(objective.name)
    return ({} if value is None else {objective.validated: value}) | task_figures(evaluation)


def fitting(width: int, gap: int = 2, among: Iterable[Column] = COLUMNS) -> list[Column]:
    """Return the columns that fit into a terminal, without those of the highest ranks."""
    columns = list(among)
    while len(columns) > 1 and sum(column.width + gap for column in columns) - gap > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def header(columns: Iterable[Column] = COLUMNS) -> str:
    """Return the line of titles."""
    return "  ".join(column.title.rjust(column.width) for column in columns)


def line(record: Record, columns: Iterable[Column] = COLUMNS) -> str:
    """Return a round as one line under `header`; the figure of `validated` may have been added to the record."""
    return "  ".join(column.cell(record).rjust(column.width) for column in columns)


def happening(event: Record) -> str:
    """Write an event as text: its kind, then its other fields except times."""
    fields = [f"{name}={value}" for name, value in event.items() if name not in {"kind", "monotonic_s", "wall_time"}]
    return " ".join([str(event.get("kind", "event")), *fields])


def closing(figures: Record) -> str:
    """Write a run's summary as one line."""
    parts = [
        f"{counted(figures.get('rounds', 0), 'round')} in {duration(figures.get('seconds'))}",
        *_work(figures),
        *_quality(figures),
        f"{(figures.get('bytes_up') or 0) / 1e6:.1f} MB up",
        _saving(figures.get("traffic_ratio")),
        f"{counted(figures['workers_lost'], 'worker')} lost" if figures.get("workers_lost") else "",
        _peak(figures.get("peak_memory_bytes")),
        f"{counted(figures['rejected'], 'delta')} rejected" if figures.get("rejected") else "",
        f"{counted(figures['slices_quarantined'], 'damaged slice')} left out"
        if figures.get("slices_quarantined")
        else "",
        _lost(figures.get("sinks") or {}),
    ]
    return "done: " + ", ".join(filter(None, parts))


def _work(figures: Record) -> list[str]:
    """Samples and tokens; the speed is that of tokens, or of samples if there are no tokens."""
    samples = f"{si(figures.get('samples'))} samples"
    if figures.get("tokens"):
        share = "" if figures.get("mfu") is None else f", MFU {figures['mfu']:.3f}"
        return [samples, f"{si(figures['tokens'])} tokens ({si(figures.get('tokens_per_s'))}/s{share})"]
    speed = figures.get("samples_per_s")
    return [samples if speed is None else f"{samples} ({si(speed)}/s)"]


def _quality(figures: Record) -> Iterator[str]:
    """Loss if that is the objective, and the last evaluation."""
    objective = objective_of([figures])
    if objective is LOSS and figures.get("loss") is not None:
        yield f"loss {figures['loss']:.4f}"
    if (value := figures.get(objective.name)) is not None:
        names = [name for name in shown_beside(objective, figures) if figures[name] is not None]
        more = ", ".join(f"{name} {figures[name]:.4g}" for name in names)
        yield f"{objective.validated} {value:.4f}" + (f" ({more})" if more else "")


def _peak(size: int | None) -> str:
    return "" if size is None else f"a worker's GPU memory up to {size / 2**30:.1f} GiB"


def _saving(ratio: float | None) -> str:
    return "" if ratio is None else f"1/{ratio:.0f} of a gradient exchange at every step"


def _lost(sinks: Record) -> str:
    counts = {name: losses["failed"] + losses["dropped"] for name, losses in sinks.items()}
    lost = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f"records lost by sinks: {lost}" if lost else ""
