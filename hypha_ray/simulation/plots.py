"""Plots of simulated runs: times of rounds, the use of the machines, and bytes; PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray.errors import ConfigError
from hypha_ray.simulation.result import HEADLINE, SimulationResult
from hypha_ray.telemetry.plots import PALETTE, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE_IN = (10.0, 4.5)
_BAR = 0.25
"""Width of a bar, where 1 is the distance of two results."""


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
        problem = f"the plots can't be written to {folder}"
        raise ConfigError("CFG015", problem, error.strerror or str(error), fix="name a folder for --plot") from None
    return paths


def _figure(title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    figure.suptitle(f"{title} ({HEADLINE})", x=0.01, ha="left")
    return figure


def _names(results: Sequence[SimulationResult]) -> list[str]:
    names: list[str] = []
    for result in results:
        varied = [f"{key.rpartition('.')[2]}={value}" for key, value in result.settings["varied"].items()]
        names.append("\n".join(varied) or result.settings["name"])
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
    for index, field in enumerate(("utilisation", "idle_fraction", "goodput")):
        places = [number + (index - 1) * _BAR for number in range(len(results))]
        heights = [100 * getattr(result, field) for result in results]
        axes.bar(places, heights, _BAR, color=PALETTE[index], label=field.replace("_", " "))
    axes.set_xticks(range(len(results)), _names(results))
    axes.set_ylabel("%")
    axes.legend(loc="upper right")
    return figure


def _bytes(results: Sequence[SimulationResult]) -> Figure:
    from matplotlib.ticker import EngFormatter

    figure = _figure("Bytes of deltas, weights and slices")
    axes = figure.subplots()
    fields = {"bytes_up": "deltas", "bytes_down": "weights", "bytes_slices": "slices"}
    for index, (field, label) in enumerate(fields.items()):
        places = [number + (index - 1) * _BAR for number in range(len(results))]
        heights = [getattr(result, field) for result in results]
        axes.bar(places, heights, _BAR, color=PALETTE[index], label=label)
    axes.set_xticks(range(len(results)), _names(results))
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.legend(loc="upper right")
    return figure
