"""Plots of a run, drawn from its files: objective, optimizers, batches, traffic, utilisation, and others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.errors import DataError
from hypha_ray.files import make_private
from hypha_ray.fleet_time import TIME_KINDS
from hypha_ray.telemetry.series import (
    GRADIENT_NORM,
    OPTIMIZATION,
    POLICY,
    SPEED,
    WAITING,
    Chart,
    Series,
    Unit,
    caption_of,
    every_step_bytes,
    gradient_norms,
    running_totals,
)
from hypha_ray.telemetry.sinks.files import METRICS, SUMMARY, kinds_to_read, read_json, read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

# Colours that are distinct with any kind of colour vision (Okabe and Ito, 2008).
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
GREY = "#6B7280"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, "#B8A800", GREY)
STYLE: Any = {
    "figure.dpi": 130,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": "#374151",
    "axes.edgecolor": "#9CA3AF",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E7EB",
    "lines.linewidth": 1.8,
    "xtick.color": "#4B5563",
    "ytick.color": "#4B5563",
    "legend.frameon": False,
    "text.parse_math": False,  # Names of runs, folders and functions are no formulas.
}
LEFT_IN = 0.95
TOP_IN = 0.85
CAPTION_IN = 0.36
"""Distance of the caption from the top, in inches."""
BOTTOM_IN = 0.55
"""Margins around the panels of a figure, in inches."""
BETWEEN_COLUMNS_IN = 1.0
BETWEEN_ROWS_IN = 0.5
"""Space between panels, in inches."""
LEGEND_GAP_IN = 0.15
COLOURBAR_IN = 0.75
"""Space at each side of a legend, and for the numbers of a bar of colours, in inches."""
LEAST_PANELS_IN = 6.0
"""Least width of the panels with their left margin, in inches: a long legend makes a figure wider."""
AXES: dict[Unit, tuple[str, str]] = {
    "": ("", ""),
    "%": ("%", ""),
    "s": ("seconds", ""),
    "B": ("bytes", "B"),
    "1/s": ("1/s", " "),
    "tokens": ("tokens", ""),
}
"""Label of an axis, and the unit behind its shortened numbers, by the unit of a chart."""
STACKED_WORKERS = len(PALETTE)
STACKED_ROUNDS = 60
"""Most workers and rounds of a stacked bar chart; larger runs get a heat map."""


def draw(run_directory: Path) -> list[Path]:
    """Draw a run's plots into its folder ``plots``; plots of an earlier call are replaced.

    Args:
        run_directory: a folder with metrics.jsonl; summary.json is used where there is one.

    Returns:
        The PNG files.

    Raises:
        DataError: DATA044, the folder's metrics have no complete round, or can't be read; or the plots not written.

    """
    path = run_directory / METRICS
    try:
        return _draw(run_directory, path)
    except OSError as error:
        got = f"{error.filename or run_directory}: {error.strerror}"
        raise DataError("DATA044", f"the plots of {run_directory} can't be drawn", got, fix="see to it") from None
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # Whatever damaged records lead to.
        problem = f"{path} has a round that can't be plotted"
        reason = " ".join(str(error).split())
        raise DataError("DATA044", problem, reason, fix="take away what hypha_ray didn't write") from None


def _draw(run_directory: Path, path: Path) -> list[Path]:
    series = Series(read_jsonl(path, kinds_to_read(path)), read_json(run_directory / SUMMARY))
    if not series.rounds:
        problem = f"{path} has no rounds to plot" if path.exists() else f"{path} does not exist"
        raise DataError("DATA044", problem, fix="give the folder of a run that has finished at least one round")
    folder = run_directory / "plots"
    folder.mkdir(exist_ok=True)
    make_private(folder)
    plots = {"batches": _batches, "finish": _finish, "bytes": _bytes, "utilisation": _utilisation}
    if series.has("time_shares"):
        plots["time"] = _time
    if _charts_of(series, OPTIMIZATION) or gradient_norms(series):
        plots["optimizer"] = _optimizer
    if _charts_of(series, POLICY):
        plots["policy"] = _policy
    if any(series.tasks.values()):
        plots = {"task": _task, **plots}
    plots = {series.objective.trained: _objective, **plots}
    caption = caption_of(run_directory, series.rounds[0])
    paths = []
    for name, plot in plots.items():
        path = folder / f"{name}.png"
        _save(path, plot, series, caption)
        paths.append(path)
    return paths


def _save(path: Path, plot: Callable[[Series], Figure], series: Series, caption: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with style():
        figure = plot(series)
        _, height_in = figure.get_size_inches()
        caption_y = 1 - CAPTION_IN / height_in
        figure.text(0.01, caption_y, caption, ha="left", va="top", fontsize=9, color=GREY, parse_math=False)
        canvas = FigureCanvasAgg(figure)
        place_panels(canvas)
        canvas.figure.savefig(path)
    make_private(path)


def place_panels(canvas: FigureCanvasAgg, between_rows_in: float = BETWEEN_ROWS_IN) -> None:
    """Size the panels of a figure, so that titles, labels and the widest legend at the right fit beside them.

    A layout engine would measure every text twice, which takes as long as all other drawing.
    """
    figure = canvas.figure
    right_in = _right_margin(canvas)
    width_in, height_in = figure.get_size_inches()
    width_in = max(width_in, right_in + LEAST_PANELS_IN)
    figure.set_size_inches(width_in, height_in)
    subplot = figure.axes[0].get_subplotspec()
    assert subplot is not None
    grid = subplot.get_topmost_subplotspec().get_gridspec()
    inner_width_in = width_in - LEFT_IN - right_in
    inner_height_in = height_in - TOP_IN - BOTTOM_IN
    panel_width = (inner_width_in - (grid.ncols - 1) * BETWEEN_COLUMNS_IN) / grid.ncols
    panel_height = (inner_height_in - (grid.nrows - 1) * between_rows_in) / grid.nrows
    figure.subplots_adjust(
        left=LEFT_IN / width_in,
        right=1 - right_in / width_in,
        top=1 - TOP_IN / height_in,
        bottom=BOTTOM_IN / height_in,
        wspace=BETWEEN_COLUMNS_IN / panel_width,
        hspace=between_rows_in / panel_height,
    )


def _right_margin(canvas: FigureCanvasAgg) -> float:
    """Width at the right of the panels that legends and bars of colours take, in inches."""
    figure = canvas.figure
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    margin_in = LEGEND_GAP_IN
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None:
            legend_in = legend.get_window_extent(renderer).width / figure.dpi
            margin_in = max(margin_in, legend_in + 2 * LEGEND_GAP_IN)
        elif axes.get_label() == "<colorbar>":
            margin_in = max(margin_in, COLOURBAR_IN)
    return margin_in


@contextmanager
def style() -> Iterator[None]:
    """Context in which matplotlib draws in the style of all plots."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        yield


def panels(title: str, rows: int = 1, columns: int = 1, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """Make a figure without pyplot: nothing global, no window system, safe in any thread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height * rows))
    figure.suptitle(
        title,
        x=0.01,
        y=1 - 0.12 / (height * rows),
        ha="left",
        va="top",
        fontsize=13,
        fontweight="bold",
        color="#111827",
    )
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=columns == 1).flat)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _by_round(axes: Axes, series: Series, title: str, y: str, unit: str = "", from_zero: bool = True) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    _label(axes, title, "round", y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(series.numbers[0] - 0.6, series.numbers[-1] + 0.6)
    if unit:
        axes.yaxis.set_major_formatter(EngFormatter(unit=unit))
    if from_zero:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.label_outer()


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def marker_for(points: int) -> str:
    """Marker of a curve with so many points; none on one with many."""
    return "o" if points <= 40 else ""


def _objective(series: Series) -> Figure:
    name = series.objective.trained
    figure, (by_samples, by_seconds) = panels(name.capitalize(), columns=2, height=4)
    samples = series.column("samples_total")
    values = [float(record[series.objective.name]) for record in series.evaluations]
    for axes, totals in ((by_samples, samples), (by_seconds, series.seconds)):
        axes.plot(totals, series.column(name), color=BLUE, marker=marker_for(len(totals)), ms=4, label="training")
        if values:
            progress = [series.total_after(totals, int(record["round"])) for record in series.evaluations]
            axes.plot(progress, values, color=RED, marker=marker_for(len(values)), ms=4, label="validation")
    by_progress(by_samples, by_seconds, name)
    return figure


def _task(series: Series) -> Figure:
    """Draw the figures of quality: fractions, except for metrics of the job's own."""
    curves: dict[str, dict[int, float]] = {}
    for round_number, figures in series.tasks.items():
        for name, value in figures.items():
            curves.setdefault(name, {})[round_number] = value
    figure, (by_samples, by_seconds) = panels(", ".join(curves).capitalize(), columns=2, height=4)
    samples = series.column("samples_total")
    are_fractions = all(0 <= value <= 1 for curve in curves.values() for value in curve.values())
    for axes, totals in ((by_samples, samples), (by_seconds, series.seconds)):
        for (name, curve), colour in zip(curves.items(), cycle(PALETTE)):
            progress = [series.total_after(totals, round_number) for round_number in curve]
            label = f"{name}, validation"
            axes.plot(progress, list(curve.values()), color=colour, marker=marker_for(len(curve)), ms=4, label=label)
        if are_fractions:
            axes.set_ylim(-0.02, 1.02)
    by_progress(by_samples, by_seconds, "fraction" if are_fractions else "")
    return figure


def by_progress(by_samples: Axes, by_seconds: Axes, y: str) -> None:
    """Label two panels with the same curves, by samples and by time."""
    from matplotlib.ticker import EngFormatter

    _label(by_samples, "by samples", "samples trained on", y)
    by_samples.xaxis.set_major_formatter(EngFormatter(sep=""))
    _label(by_seconds, "by time", "seconds of training", y)
    _legend(by_seconds)


def _batches(series: Series) -> Figure:
    figure, (axes,) = panels("Batches of each worker", height=4)
    if len(series.workers) <= STACKED_WORKERS and len(series.rounds) <= STACKED_ROUNDS:
        bottom = [0] * len(series.rounds)
        for worker, colour in zip(series.workers, PALETTE, strict=False):
            counts = series.batches(worker)
            label = f"worker {worker}"
            axes.bar(series.numbers, counts, 0.8, bottom, color=colour, edgecolor="white", lw=0.5, label=label)
            bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
        _by_round(axes, series, "stacked, one colour for each worker", "batches")
        _legend(axes)
    else:
        _heat(figure, axes, series)
    return figure


def _heat(figure: Figure, axes: Axes, series: Series) -> None:
    rows = [series.batches(worker) for worker in series.workers]
    image_extent = (series.numbers[0] - 0.5, series.numbers[-1] + 0.5, len(rows) - 0.5, -0.5)
    image = axes.imshow(rows, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, extent=image_extent)
    axes.grid(visible=False)
    _by_round(axes, series, "one row for each worker", "worker", from_zero=False)
    step = -(-len(rows) // 16)
    axes.set_yticks(range(0, len(rows), step), series.workers[::step])
    figure.colorbar(image, ax=axes, label="batches in the round")


def _finish(series: Series) -> Figure:
    figure, (times, errors) = panels("When rounds finished, and when the planner said they would", rows=2, height=3)
    marker = marker_for(len(series.rounds))
    actual = series.column("finish_s", otherwise="time_s")
    predicted = series.column("predicted_s")
    times.plot(series.numbers, actual, color=BLUE, marker=marker, ms=4, label="actual")
    times.plot(series.numbers, predicted, color=ORANGE, marker=marker, ms=4, ls="--", label="predicted")
    _by_round(times, series, "from the start of the round to the last delta", "seconds")
    _legend(times)
    errors.bar(series.numbers, series.column("plan_error", 100), 0.8, color=GREY)
    errors.axhline(0, color="#374151", lw=0.8)
    _by_round(errors, series, "relative error of the plan", "%", from_zero=False)
    return figure


def _bytes(series: Series) -> Figure:
    figure, (round_axes, total_axes) = panels("Bytes between workers and servers", rows=2, height=3)
    up_bytes = series.column("bytes_up")
    down_bytes = series.column("bytes_down")
    # The two are often equal; the wider line is then visible on both sides of the other.
    for values, colour, width, label in ((up_bytes, SKY, 5, "up: deltas"), (down_bytes, BLUE, 1.8, "down: weights")):
        for axes, points in ((round_axes, values), (total_axes, running_totals(values))):
            axes.plot(series.numbers, points, color=colour, lw=width, marker="o", ms=width, label=label)
    _by_round(round_axes, series, "in each round", "bytes", unit="B")
    every_step = every_step_bytes(series)
    if every_step:
        total_axes.plot(
            series.numbers, every_step, color=GREY, ls="--", label="up, if gradients were\nexchanged every step"
        )
        total_axes.set_yscale("log")
        _by_round(total_axes, series, "so far, logarithmic", "bytes", unit="B", from_zero=False)
    else:
        _by_round(total_axes, series, "so far", "bytes", unit="B")
    _legend(round_axes)
    _legend(total_axes)
    return figure


def _charts_of(series: Series, charts: Iterable[Chart]) -> list[Chart]:
    """Charts that the run has figures of."""
    return [chart for chart in charts if series.labels_of(chart)]


def _draw_chart(axes: Axes, series: Series, chart: Chart) -> None:
    """Draw the curves of a chart that the run has figures of."""
    is_percentage = chart.unit == "%"
    for (name, label), colour in zip(series.labels_of(chart).items(), PALETTE, strict=False):
        values = series.column(name, 100 if is_percentage else 1)
        axes.plot(series.numbers, values, color=colour, marker=marker_for(len(values)), ms=4, label=label)
    y, unit = AXES[chart.unit]
    _by_round(axes, series, chart.title, y, unit=unit, from_zero=bool(chart.unit))
    _legend(axes)


def _utilisation(series: Series) -> Figure:
    charts = _charts_of(series, (*SPEED, *WAITING))
    figure, all_axes = panels("What workers got done, and what they waited for", max(1, len(charts)), height=2.6)
    for axes, chart in zip(all_axes, charts, strict=False):
        _draw_chart(axes, series, chart)
    return figure


def _policy(series: Series) -> Figure:
    charts = _charts_of(series, POLICY)
    figure, all_axes = panels("The policy, and what it answers", len(charts), height=2.6)
    for axes, chart in zip(all_axes, charts, strict=True):
        _draw_chart(axes, series, chart)
    return figure


def _optimizer(series: Series) -> Figure:
    """Draw learning rate, step of the global weights, and the norms of the gradients that workers report."""
    charts = _charts_of(series, OPTIMIZATION)
    norms = gradient_norms(series)
    rows = len(charts) + bool(norms)
    figure, all_axes = panels("Steps of the optimizers", rows, height=2.6)
    for axes, chart in zip(all_axes, charts, strict=False):
        _draw_chart(axes, series, chart)
    if norms:
        for (label, (progress, values)), colour in zip(norms.items(), PALETTE, strict=False):
            all_axes[-1].plot(progress, values, color=colour, lw=1, label=label)
        _by_round(all_axes[-1], series, GRADIENT_NORM, "")
        _legend(all_axes[-1])
    return figure


def _time(series: Series) -> Figure:
    """Draw the goodput, and below it the uses of the fleet's time as stacked areas that fill the panel."""
    figure, (useful_axes, parts_axes) = panels("Goodput, and what the fleet's time was spent on", rows=2, height=3)
    useful_axes.plot(
        series.numbers, series.column("goodput", 100), color=BLUE, marker=marker_for(len(series.rounds)), ms=4
    )
    _by_round(useful_axes, series, "committed samples, of those that the hired workers could have made", "%")
    numbers = series.numbers
    edges = [numbers[0] - 0.5, *numbers, numbers[-1] + 0.5]
    shares: list[list[float]] = []
    for use in TIME_KINDS:
        column = series.time_shares(use)
        shares.append([column[0], *column, column[-1]])
    parts_axes.stackplot(edges, shares, labels=TIME_KINDS, colors=PALETTE)
    _by_round(parts_axes, series, "all time of the fleet, from the first machine on", "%", from_zero=False)
    parts_axes.set_ylim(0, 100)
    _legend(parts_axes)
    return figure
