"""Charts of a run's page, as figures of plotly.js: plain tables with the numbers of the run's own records.

Colours are names of variables of the page's style, such as ``--blue``, which differ between light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from typing import Any, TypeAlias

from hypha_ray.history.thinning import kept_points
from hypha_ray.telemetry.charts import Chart, Unit
from hypha_ray.telemetry.series import Series
from hypha_ray.telemetry.sinks.table import duration, si

Trace: TypeAlias = dict[str, Any]
COLOURS = ("--blue", "--orange", "--green", "--red", "--purple", "--sky", "--yellow", "--grey")
MOST_POINTS = 12_000
"""Most points of all curves of a page together, about."""
CURVES_OF_A_SUMMARY = 3
"""Most curves of which a caption tells each."""
POINTS_OF_A_CURVE = 800
"""Most points of one curve, about."""
FORMATS: dict[Unit, tuple[str, str]] = {
    "": ("", ".6~g"),
    "%": (".2~%", ".2~%"),
    "s": ("", ",.4~f"),
    "B": (".3~s", ".4~s"),
    "1/s": (".3~s", ".4~s"),
    "tokens": ("", ",.2~f"),
}
"""Formats of plotly.js for the ticks of an axis and for a value, by the unit."""
SUFFIXES: dict[Unit, str] = {"": "", "%": "", "s": " s", "B": "B", "1/s": "/s", "tokens": " tokens"}


@dataclass(frozen=True, slots=True)
class Line:
    """A curve; both lists have one element for each point, and a value that is missing is NaN."""

    label: str
    rounds: Sequence[float]
    """Numbers of rounds, counted from one."""
    values: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """A chart of the page."""

    title: str
    summary: str
    """Text for the figure's caption: what the curves begin and end with."""
    data: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    height_px: int = 280
    wide: bool = False
    """Whether the chart takes the whole width of the page."""
    thinned: bool = False
    """Whether points were left out."""


def lines_of(series: Series, chart: Chart) -> list[Line]:
    """Return the curves of a chart that the run has values of."""
    lines = []
    for name, label in chart.labels.items():
        if series.has(name):
            lines.append(Line(label, series.numbers, series.column(name)))
    return lines


def figures_of(series: Series, charts: Iterable[Chart], most_points: int) -> Iterator[ReportFigure]:
    """Draw the charts that the run has figures of."""
    for chart in charts:
        figure = line_figure(chart.title, chart.unit, lines_of(series, chart), most_points)
        if figure is not None:
            yield figure


def line_figure(title: str, unit: Unit, lines: Sequence[Line], most_points: int) -> ReportFigure | None:
    """Draw curves by round; None if there are none.

    Args:
        title: title of the chart.
        unit: unit of all curves.
        lines: the curves.
        most_points: most points of a curve, about.

    """
    if not lines:
        return None
    tick_format, value_format = FORMATS[unit]
    traces: list[Trace] = []
    summaries: list[str] = []
    is_thinned = False
    for line, colour in zip(lines, cycle(COLOURS)):
        places = kept_points(line.values, most_points)
        is_thinned |= len(places) < len(line.values)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(places) <= 40 else "lines",
                "name": escape(line.label),
                "x": [line.rounds[place] for place in places],
                "y": [number_or_none(line.values[place]) for place in places],
                "line": {"color": colour, "width": 2, **({"dash": "dash"} if line.dashed else {})},
                "marker": {"size": 5},
                "hovertemplate": f"%{{y:{value_format}}}{SUFFIXES[unit]}",
            }
        )
        summaries.append(_summary(line, unit))
    layout = {
        "yaxis": {"tickformat": tick_format, "ticksuffix": SUFFIXES[unit]},
        "hovermode": "closest" if is_thinned else "x unified",
        "showlegend": len(lines) > 1,
    }
    summary = "; ".join(summaries)
    if len(lines) > CURVES_OF_A_SUMMARY:
        summary = f"{len(lines)} curves"
    return ReportFigure(title, summary, traces, layout, thinned=is_thinned)


def _summary(line: Line, unit: Unit) -> str:
    """Text about a curve: its first value, its last one, and between which it lies."""
    present = [value for value in line.values if not math.isnan(value)]
    if not present:
        return line.label
    first = value_text(present[0], unit)
    last = value_text(present[-1], unit)
    least = value_text(min(present), unit)
    greatest = value_text(max(present), unit)
    text = f"{line.label} {last}"
    if least != greatest:
        text = f"{line.label} {first} → {last}"
        if not {least, greatest} <= {first, last}:
            text += f", between {least} and {greatest}"
    return text


def value_text(value: float, unit: Unit) -> str:
    """Write a value with its unit, in one style for the whole page."""
    match unit:
        case "%":
            return f"{value:.1%}"
        case "s":
            return duration(value) if value >= 1 else f"{value:.3g}s"
        case "B":
            return f"{si(value)}B"
        case "1/s":
            return f"{si(value)}/s" if value >= 10 else f"{value:.3g}/s"
        case "tokens":
            return f"{value:.4g} tokens"
    return f"{value:.5g}"


def number_or_none(value: float) -> float | None:
    """Return a number as JSON has it; None for NaN."""
    return None if math.isnan(value) else value
