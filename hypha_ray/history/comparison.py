"""Comparison of runs: the settings that differ, figures side by side, and the curves of their objectives.

The page of a comparison is one HTML file, with its plot inside, that needs nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from hypha_ray.config.compare import settings_that_differ
from hypha_ray.config.keys import shown
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.figures import METRIC, OBJECTIVES
from hypha_ray.history.account import RunFiles
from hypha_ray.history.html_page import html_page, html_section, html_table
from hypha_ray.history.overview import cost_of, readable, text_of
from hypha_ray.telemetry.comparison_plot import draw_curves
from hypha_ray.telemetry.run_summary import summary
from hypha_ray.telemetry.series import Series
from hypha_ray.telemetry.sinks.files import SUMMARY, Record, read_json
from hypha_ray.telemetry.sinks.table import ABSENT, duration, si

Row: TypeAlias = tuple[str, ...]
"""Name of a setting or figure, and its text for each run."""
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
    twice = [folder for number, folder in enumerate(folders) if folder in folders[:number]]
    if twice:
        raise ConfigError(
            "CFG003", "--run is out of range", f"{twice[0].name} twice", "different runs", "name each once"
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
    all_figures = list(map(figures_of_run, runs))
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
        metrics |= {name: (name, _number) for name in figures if name.startswith(METRIC)}
    return {**FIGURES, **metrics}


def _setting(value: Any) -> str:
    return _text(value, shown)


def _text(value: Any, format: Callable[[Any], str]) -> str:
    if value is None:
        return ABSENT
    return format(value)


def figures_of_run(run: RunFiles) -> Record:
    """Return the fields of a run's summary as far as it has come, with its cost."""
    last_summary = read_json(run.folder / SUMMARY)
    figures = summary(run.metrics, run.events, last_summary.get("parameter_bytes"))
    return {**figures, "cost": cost_of(run.events)}


def picture_of(comparison: Comparison) -> bytes | None:
    """Draw the curves of the runs as a PNG; None if none of them has a round."""
    runs_by_figure: dict[str, list[str]] = {}
    series: dict[str, Series] = {}
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        figure = _trained_figure(run)
        if figure is not None:
            runs_by_figure.setdefault(figure, []).append(name)
            series[name] = Series(run.metrics, {})
    if not series:
        return None
    return draw_curves(series, runs_by_figure)


def _trained_figure(run: RunFiles) -> str | None:
    """Name of the figure that a run's rounds are compared by: the reward if there is one, otherwise the loss."""
    for objective in OBJECTIVES:
        for record in run.rounds:
            if record.get(objective.trained) is not None:
                return objective.trained
    return None


def page(comparison: Comparison, picture: bytes | None) -> str:
    """Return the page; `picture` is a PNG, None without a curve."""
    return html_page(", ".join(comparison.names), _body(comparison, picture))


def _body(comparison: Comparison, picture: bytes | None) -> Iterator[str]:
    yield f"<header><h1>{escape(', '.join(comparison.names))}</h1></header>\n<main>"
    settings = ["<p>None.</p>"]
    if comparison.settings:
        settings = list(html_table("Settings", ("key", *comparison.names), comparison.settings))
    yield html_section("settings", "Settings that differ", settings)
    figures = html_table("Figures", ("figure", *comparison.names), comparison.figures)
    yield html_section("figures", "Figures", figures)
    if picture is not None:
        data = b64encode(picture).decode("ascii")
        image = f'<img alt="curves of the runs" src="data:image/png;base64,{data}">'
        yield html_section("curves", "Curves", [image])
    yield "</main>"
