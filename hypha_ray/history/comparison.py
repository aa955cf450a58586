"""Comparison of runs: the settings that differ, figures side by side, and the curves of their objectives.

The page of a comparison is one HTML file, with its charts inside, that needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hypha_ray.config.keys import shown
from hypha_ray.config.load import settings_that_differ
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.figures import METRIC, OBJECTIVES
from hypha_ray.history.account import RunFiles
from hypha_ray.history.overview import readable, text_of
from hypha_ray.history.report_charts import (
    COLOURS,
    CONTENT_POLICY,
    NO_SCRIPT,
    POINTS_OF_A_CURVE,
    Line,
    ReportFigure,
    chart_grid,
    chart_scripts,
    html_page,
    html_section,
    html_table,
    line_figure,
)
from hypha_ray.telemetry.plots import PALETTE, by_progress, marker_for, panels, place_panels, style
from hypha_ray.telemetry.series import Series
from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.telemetry.sinks.table import ABSENT, duration, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row: TypeAlias = tuple[str, ...]
"""Name of a setting or figure, and its text for each run."""
BETWEEN_ROWS_IN = 0.95
"""Space between rows of panels, each with its own axes and titles, in inches."""
PLOT_PX = 260
LEGEND_LINE_PX = 20
"""Heights of a chart without its legend, and of a curve's line in it."""
Format: TypeAlias = Callable[[float | None], str]


def _number(value: float | None) -> str:
    return text_of(value, ".4f")


def _fraction(value: float | None) -> str:
    return text_of(value, ".1%")


def _bytes(value: float | None) -> str:
    return f"{si(value)}B"


FIGURES: Mapping[str, tuple[str, Format]] = {
    "rounds": ("rounds", text_of),
    "samples": ("samples", si),
    "tokens": ("tokens", si),
    "training time": ("seconds", duration),
    "samples/s": ("samples_per_s", si),
    "tokens/s": ("tokens_per_s", si),
    "loss": ("loss", _number),
    "val_loss": ("val_loss", _number),
    "best val_loss": ("best_val_loss", _number),
    "perplexity": ("perplexity", _number),
    "accuracy": ("accuracy", _number),
    "margin": ("margin", _number),
    "val_reward": ("reward", _number),
    "best val_reward": ("best_reward", _number),
    "pass@1": ("pass@1", _number),
    "bytes up": ("bytes_up", _bytes),
    "bytes down": ("bytes_down", _bytes),
    "goodput": ("goodput", _fraction),
    "idle": ("idle_fraction", _fraction),
    "workers lost": ("workers_lost", text_of),
    "deltas rejected": ("rejected", text_of),
    "cost": ("cost", _number),
}
"""Names of figures, with the field of `summary` and the form of its text."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two or more runs, side by side."""

    names: Row
    """Names of the runs; folders of runs that have one name."""
    settings: list[Row]
    """Settings that differ."""
    figures: list[Row]
    """Figures that any of the runs has."""
    runs: tuple[RunFiles, ...]


def compared(folders: Sequence[Path]) -> Comparison:
    """Compare runs.

    Raises:
        ConfigError: CFG003, a run is named twice.
        DataError: DATA044, a file of a run can't be read, or has a record of another program.

    """
    repeated_folders = [folder for number, folder in enumerate(folders) if folder in folders[:number]]
    if repeated_folders:
        raise ConfigError(
            "CFG003", "--run is out of range", f"{repeated_folders[0].name} twice", "different runs", "name each once"
        )
    runs = tuple(map(_read, folders))
    names = [run.folder.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    settings: list[Row] = []
    for key, values in settings_that_differ([run.tables for run in runs]).items():
        settings.append((key, *map(_setting, values)))
    with readable(f"one of {', '.join(names)}"):
        figures = _figure_rows(runs)
    return Comparison(tuple(names), settings, figures, runs)


def _read(folder: Path) -> RunFiles:
    with readable(folder):
        run = RunFiles.read(folder)
    if not run.tables:
        problem = f"the job file of {folder} can't be read"
        raise DataError("DATA044", problem, "damaged", "TOML", "restore it, or leave the run out")
    return run


def _figure_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Rows of the figures that any run has."""
    all_figures = [run.figures for run in runs]
    rows: list[Row] = []
    for name, (field, format) in shown_figures(all_figures).items():
        texts = [_text(figures.get(field), format) for figures in all_figures]
        if set(texts) != {ABSENT}:
            rows.append((name, *texts))
    return rows


def shown_figures(all_figures: Iterable[Record]) -> dict[str, tuple[str, Format]]:
    """Return `FIGURES`, and behind them the jobs' own metrics of the last evaluations."""
    metrics: dict[str, tuple[str, Format]] = {}
    for figures in all_figures:
        for name in figures:
            if name.startswith(METRIC):
                metrics[name] = (name, _number)
    return {**FIGURES, **metrics}


def _setting(value: Any) -> str:
    return _text(value, shown)


def _text(value: Any, format: Callable[[Any], str]) -> str:
    if value is None:
        return ABSENT
    return format(value)


def picture_of(comparison: Comparison) -> bytes | None:
    """Draw the curves of the runs as a PNG; None if none of them has a round."""
    series = _series_of(comparison)
    runs_by_figure: dict[str, list[str]] = {}
    for name, run_series in series.items():
        runs_by_figure.setdefault(_trained_figure(run_series), []).append(name)
    if not series:
        return None
    return draw_curves(series, runs_by_figure)


def _series_of(comparison: Comparison) -> dict[str, Series]:
    """Rounds and evaluations of the runs that have trained, by their names."""
    series = {}
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        run_series = Series(run.all_metrics(), {})
        if any(run_series.has(objective.trained) for objective in OBJECTIVES):
            series[name] = run_series
    return series


def _trained_figure(series: Series) -> str:
    """Name of the figure that a run's rounds are compared by: the reward if there is one, otherwise the loss."""
    reward, loss = OBJECTIVES
    return reward.trained if series.has(reward.trained) else loss.trained


def page(comparison: Comparison) -> str:
    """Return the page, with charts if any of the runs has a round."""
    return html_page(", ".join(comparison.names), _body(comparison), [CONTENT_POLICY])


def _body(comparison: Comparison) -> Iterator[str]:
    yield f"<header><h1>{escape(', '.join(comparison.names))}</h1></header>\n<main>"
    settings = ["<p>None.</p>"]
    if comparison.settings:
        settings = list(html_table("Settings", ("key", *comparison.names), comparison.settings))
    yield html_section("settings", "Settings that differ", settings)
    figures = html_table("Figures", ("figure", *comparison.names), comparison.figures)
    yield html_section("figures", "Figures", figures)
    charts: list[ReportFigure] = []
    grid = list(chart_grid(list(_charts(_series_of(comparison))), charts))
    if charts:
        yield html_section("curves", "Curves", [NO_SCRIPT, *grid])
    yield "</main>"
    if charts:
        yield from chart_scripts(charts)


def _charts(series_by_run: Mapping[str, Series]) -> Iterator[ReportFigure]:
    """Two charts of each training figure: by samples, and by time."""
    colours = dict(zip(series_by_run, cycle(COLOURS), strict=False))
    for figure in dict.fromkeys(map(_trained_figure, series_by_run.values())):
        by_samples: list[Line] = []
        by_time: list[Line] = []
        for run, series in series_by_run.items():
            if _trained_figure(series) == figure:
                by_samples += _curves(series, series.column("samples_total"), run, colours[run])
                by_time += _curves(series, series.seconds, run, colours[run])
        yield from _chart(f"{figure.capitalize()} by samples", "samples trained on", ".3~s", by_samples)
        yield from _chart(f"{figure.capitalize()} by time", "seconds of training", ",.4~g", by_time)


def _curves(series: Series, totals: Sequence[float], run: str, colour: str) -> Iterator[Line]:
    """A run's training, dashed, and its evaluations over the amount of training."""
    trained_column = series.column(_trained_figure(series))
    yield Line(f"training of {run}", totals, trained_column, dashed=True, colour=colour)
    if series.evaluations:
        progress, values = _evaluated(series, totals)
        yield Line(f"validation of {run}", progress, values, colour=colour)


def _evaluated(series: Series, totals: Sequence[float]) -> tuple[list[float], list[float]]:
    """Amounts of training before a run's evaluations, and their values."""
    progress = []
    values = []
    for record in series.evaluations:
        progress.append(series.total_after(totals, int(record["round"])))
        values.append(float(record[series.objective.name]))
    return progress, values


def _chart(title: str, axis: str, tick_format: str, lines: Sequence[Line]) -> Iterator[ReportFigure]:
    """A chart of curves that don't go by rounds."""
    chart = line_figure(title, "", lines, POINTS_OF_A_CURVE)
    if chart is not None:
        chart.layout["xaxis"] = {"title": {"text": axis, "standoff": 8}, "tickformat": tick_format}
        chart.layout["hovermode"] = "closest"
        yield replace(chart, height_px=PLOT_PX + LEGEND_LINE_PX * len(lines))


def draw_curves(series_by_run: Mapping[str, Series], runs_by_figure: Mapping[str, Sequence[str]]) -> bytes:
    """Draw the training figures and evaluations of runs, a colour for each run.

    Args:
        series_by_run: rounds and evaluations by the names of the runs.
        runs_by_figure: names of the runs that have a training figure, by that; each figure has two panels.

    Returns:
        A PNG.

    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    colours = dict(zip(series_by_run, cycle(PALETTE), strict=False))
    with style():
        figure, axes = panels("Runs side by side", rows=len(runs_by_figure), columns=2, height=4)
        for row, (name, runs) in enumerate(runs_by_figure.items()):
            pair = axes[2 * row], axes[2 * row + 1]
            for run in runs:
                draw_run(pair, series_by_run[run], name, run, colours[run])
            by_progress(*pair, name)
        canvas = FigureCanvasAgg(figure)
        place_panels(canvas, BETWEEN_ROWS_IN)
        image_file = BytesIO()
        figure.savefig(image_file, format="png")
    return image_file.getvalue()


def draw_run(pair: tuple[Axes, Axes], series: Series, name: str, run: str, colour: str) -> None:
    """Draw a run's training dashed and its evaluations solid, by samples and by time.

    Labels don't begin with the run's name, since matplotlib leaves out those that begin with an underscore.
    """
    samples = series.column("samples_total")
    for axes, totals in zip(pair, (samples, series.seconds), strict=True):
        mark = marker_for(len(totals))
        axes.plot(
            totals, series.column(name), color=colour, marker=mark, ms=4, ls="--", lw=1, label=f"training of {run}"
        )
        if series.evaluations:
            progress, values = _evaluated(series, totals)
            axes.plot(
                progress, values, color=colour, marker=marker_for(len(values)), ms=4, label=f"validation of {run}"
            )
