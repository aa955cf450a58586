"""Simulation of one scenario and its result: times, bytes, utilisation and cost; there is no loss in it.

Results are shown as a table with the keys in which they differ, and as plots of rounds, machines and bytes.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.config.entry_point import write_result
from hypha_ray.config.options import unwritable_plots
from hypha_ray.errors import HyphaError
from hypha_ray.simulation.exchange import size_notes
from hypha_ray.simulation.fleet_world import FleetWorld
from hypha_ray.simulation.scenario import Scenario
from hypha_ray.telemetry.plots import PALETTE, STYLE
from hypha_ray.telemetry.sinks.table import ConsoleColumn, duration, header, line, si
from hypha_ray.texts import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADLINE = "simulated: times, bytes and costs; no loss curve"
"""First line of every output of a simulation."""
DIGITS = 9
"""Significant digits of numbers in JSON."""
_SIZE_IN = (10.0, 4.5)
_BAR = 0.25
"""Width of a bar, where 1 is the distance of two results."""
OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the record of each round, as soon as it is there."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures of one run. Times in seconds, sizes in bytes."""

    settings: dict[str, Any]
    """The whole scenario, see `Scenario.settings`."""
    rounds: int
    """Number of committed rounds."""
    time_s: float
    """Time from the start to the last commit; the end of the run if there is none."""
    bytes_up: int
    """Bytes of deltas that reached the head."""
    bytes_down: int
    """Bytes of weights that reached workers."""
    bytes_slices: int
    """Bytes of slices that reached workers."""
    utilisation: float
    """Worker time in batches ÷ worker time alive."""
    idle_fraction: float
    """Worker time at the barrier, from the delta to new weights, ÷ worker time alive."""
    goodput: float
    """Committed samples ÷ those of all machines if each trained from its start to the end at its nominal speed."""
    cost: float
    """Sum of price · hours of all leases."""
    samples: int
    """Committed samples."""
    events: dict[str, int]
    """Number of events of the scheduler's log and of failures, by kind."""
    round_s: tuple[float, ...]
    """Time of each round, from its commit back to the one before or the start."""
    round_metrics: tuple[dict[str, Any], ...] = ()
    """Records of rounds as in metrics.jsonl, without figures of a loss."""
    failure: str | None = None
    """Reason of an end before the last round; None if all rounds were committed."""
    notes: tuple[str, ...] = field(default=())
    """Limits of the figures, such as estimated bytes."""

    def as_json(self) -> dict[str, Any]:
        """The figures as plain values, rounded to 9 significant digits, in a fixed order."""
        names = [figure.name for figure in fields(self) if figure.name != "round_metrics"]
        rounded: dict[str, Any] = _rounded({name: getattr(self, name) for name in names})
        return rounded


def write_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write results as a JSON list, to the file of ``--json``; equal results give equal bytes.

    Raises:
        ConfigError: CFG008, the file can't be written.

    """
    text = json.dumps(rows, indent=2, sort_keys=True, allow_nan=False)
    write_result("--json", file, text + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(name): _rounded(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(child) for child in value]
    return value


def table(results: Sequence[SimulationResult]) -> Iterator[str]:
    """Lines of a table of results, and below it the notes and failures of each."""
    labels = [_label(result) for result in results]
    columns = _columns(max(map(len, labels)))
    yield header(columns)
    for label, result in zip(labels, results, strict=True):
        yield line({"label": label, **result.as_json()}, columns)
    for label, result in zip(labels, results, strict=True):
        if result.failure is not None:
            yield f"{label}: ended after {counted(result.rounds, 'round')}: {result.failure}"
    for note in dict.fromkeys(note for result in results for note in result.notes):
        yield f"note: {note}"


def _label(result: SimulationResult) -> str:
    """Name of the scenario, and the values of the keys that were set for this result."""
    varied_settings: dict[str, Any] = result.settings["varied"]
    values = [f"{key.rpartition('.')[2]}={value}" for key, value in varied_settings.items()]
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


def draw_results(results: Sequence[SimulationResult], folder: Path) -> list[Path]:
    """Draw results beside each other; plots of an earlier call are replaced.

    Returns:
        The PNG files.

    Raises:
        ConfigError: CFG015, the folder can't be written.

    """
    import matplotlib as mpl

    plots: dict[str, Callable[[Sequence[SimulationResult]], Figure]] = {
        "rounds": _round_times,
        "use": _use_of_machines,
        "bytes": _bytes,
    }
    paths: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, plot in plots.items():
            path = folder / f"{name}.png"
            with mpl.rc_context(STYLE):
                plot(results).savefig(path)
            paths.append(path)
    except OSError as error:
        raise unwritable_plots("--plot", folder, error) from None
    return paths


def _figure(title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    figure.suptitle(f"{title} ({HEADLINE})", x=0.01, ha="left")
    return figure


def _names(results: Sequence[SimulationResult]) -> list[str]:
    names: list[str] = []
    for result in results:
        varied_texts = [f"{key.rpartition('.')[2]}={value}" for key, value in result.settings["varied"].items()]
        names.append("\n".join(varied_texts) or result.settings["name"])
    return names


def _round_times(results: Sequence[SimulationResult]) -> Figure:
    figure = _figure("Time of each round")
    axes = figure.subplots()
    for index, (name, result) in enumerate(zip(_names(results), results, strict=True)):
        numbers = range(1, len(result.round_s) + 1)
        colour = PALETTE[index % len(PALETTE)]
        axes.plot(numbers, result.round_s, color=colour, label=name.replace("\n", " "))
    axes.set_xlabel("round")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    return figure


def _use_of_machines(results: Sequence[SimulationResult]) -> Figure:
    figure = _figure("Use of the machines")
    axes = figure.subplots()
    for index, share in enumerate(("utilisation", "idle_fraction", "goodput")):
        places = [number + (index - 1) * _BAR for number in range(len(results))]
        heights = [100 * getattr(result, share) for result in results]
        axes.bar(places, heights, _BAR, color=PALETTE[index], label=share.replace("_", " "))
    axes.set_xticks(range(len(results)), _names(results))
    axes.set_ylabel("%")
    axes.legend(loc="upper right")
    return figure


def _bytes(results: Sequence[SimulationResult]) -> Figure:
    from matplotlib.ticker import EngFormatter

    figure = _figure("Bytes of deltas, weights and slices")
    axes = figure.subplots()
    fields = {"bytes_up": "deltas", "bytes_down": "weights", "bytes_slices": "slices"}
    for index, (share, label) in enumerate(fields.items()):
        places = [number + (index - 1) * _BAR for number in range(len(results))]
        heights = [getattr(result, share) for result in results]
        axes.bar(places, heights, _BAR, color=PALETTE[index], label=label)
    axes.set_xticks(range(len(results)), _names(results))
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.legend(loc="upper right")
    return figure


def simulate(scenario: Scenario, on_round: OnRound | None = None) -> SimulationResult:
    """Simulate a run to its end. Equal scenarios give equal results.

    Args:
        scenario: the scenario, as `read_scenarios` gives it.
        on_round: called with the record of each round.

    Raises:
        HyphaError: a fault of the scenario's files; the end of a simulated run by lack of machines is a result.

    """
    world = FleetWorld(scenario)
    world.on_round = on_round
    searches = gc.isenabled()
    gc.disable()  # The world's objects form no cycles before its end.
    try:
        world.open()
        world.run()
        world.close()
    finally:
        if searches:
            gc.enable()
    return result_of(world)


def result_of(world: FleetWorld) -> SimulationResult:
    """Figures of a run that has ended."""
    scenario = world.scenario
    ends = [0.0, *world.committed_at]
    alive_s = world.alive_s or 1.0
    failure = world.failure
    if failure is not None and not isinstance(failure, HyphaError):
        raise failure
    return SimulationResult(
        settings=scenario.settings(),
        rounds=len(world.committed_at),
        time_s=ends[-1] if world.committed_at else world.now,
        bytes_up=world.traffic.bytes_up,
        bytes_down=world.traffic.bytes_down,
        bytes_slices=world.traffic.bytes_slices,
        utilisation=world.batches_s / alive_s,
        idle_fraction=world.waited_s / alive_s,
        goodput=_goodput(world),
        cost=world.cost(),
        samples=world.samples,
        events=dict(sorted(world.events.items())),
        round_s=tuple(stop - start for start, stop in pairwise(ends)),
        round_metrics=tuple(world.records),
        failure=None if failure is None else failure.what,
        notes=size_notes(scenario.job, world.sizes.visible_shares),
    )


def _goodput(world: FleetWorld) -> float:
    """Committed samples ÷ those of all machines if each trained from its start to the end."""
    batch_size = world.job.rounds.max_batch_size
    possible = 0.0
    for machine in world.pool.machines:
        if machine.began_at is not None:
            possible += (world.now - machine.began_at) / machine.nominal_batch_s * batch_size
    return world.samples / possible if possible else 0.0
