"""Results as a table for the console: a row each, with the keys in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypha_ray.simulation.result import SimulationResult
from hypha_ray.telemetry.sinks.table import ConsoleColumn, duration, header, line, si


def table(results: Sequence[SimulationResult]) -> Iterator[str]:
    """Lines of a table of results, and below it the notes and failures of each."""
    labels = [_label(result) for result in results]
    columns = _columns(max(map(len, labels)))
    yield header(columns)
    for label, result in zip(labels, results, strict=True):
        yield line({"label": label, **result.as_json()}, columns)
    for label, result in zip(labels, results, strict=True):
        if result.failure is not None:
            yield f"{label}: ended after {result.rounds} rounds: {result.failure}"
    for note in dict.fromkeys(note for result in results for note in result.notes):
        yield f"note: {note}"


def _label(result: SimulationResult) -> str:
    """Name of the scenario, and the values of the keys that were set for this result."""
    varied: dict[str, Any] = result.settings["varied"]
    values = [f"{key.rpartition('.')[2]}={value}" for key, value in varied.items()]
    return " ".join([result.settings["name"], *values])


def _columns(label_width: int) -> list[ConsoleColumn]:
    def percent(name: str) -> Any:
        return lambda record: f"{100 * record[name]:.1f}"

    def text_of_bytes(name: str) -> Any:
        return lambda record: f"{si(record[name])}B"

    return [
        ConsoleColumn("scenario", label_width, 0, lambda record: record["label"].ljust(label_width)),
        ConsoleColumn("workers", 7, 0, lambda record: str(record["settings"]["workers"])),
        ConsoleColumn("rounds", 6, 0, lambda record: str(record["rounds"])),
        ConsoleColumn("time", 7, 0, lambda record: duration(record["time_s"])),
        ConsoleColumn("samples", 7, 0, lambda record: si(record["samples"])),
        ConsoleColumn("up", 8, 0, text_of_bytes("bytes_up")),
        ConsoleColumn("down", 8, 0, text_of_bytes("bytes_down")),
        ConsoleColumn("util %", 6, 0, percent("utilisation")),
        ConsoleColumn("idle %", 6, 0, percent("idle_fraction")),
        ConsoleColumn("goodput %", 9, 0, percent("goodput")),
        ConsoleColumn("cost", 9, 0, lambda record: f"{record['cost']:.2f}"),
    ]
