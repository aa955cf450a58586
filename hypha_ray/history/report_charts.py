"""HTML pages about runs, and their charts: figures of plotly.js with the numbers of the run's own records.

A page is one file with its style inside, which asks no server for anything. Long curves and lists are thinned: ends and
extremes are kept, and nothing is averaged. Colours are names of variables of the page's style, such as ``--blue``,
which differ between light and dark.
"""

from __future__ import annotations

import json
import math
import pkgutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hypha_ray.telemetry.series import (
    TRAFFIC,
    Chart,
    Series,
    Unit,
    every_step_bytes,
    running_totals,
)
from hypha_ray.telemetry.sinks.table import duration, si
from hypha_ray.texts import counted

_STYLE = Path(__file__).with_name("page.css")
T = TypeVar("T")
Trace: TypeAlias = dict[str, Any]
COLOURS = ("--blue", "--orange", "--green", "--red", "--purple", "--sky", "--yellow", "--grey")
_SCRIPT = Path(__file__).with_name("report.js")
CONTENT_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:\">"
)
"""Policy of the page: it may load nothing from elsewhere."""
NO_SCRIPT = '<noscript><p class="note">The charts need JavaScript.</p></noscript>'
"""Text that a browser without scripts shows in place of charts."""
MOST_POINTS = 12_000
"""Most points of all curves of a page together, about."""
MOST_MARKERS = 40
"""Most points of a curve that are marked."""
CURVES_OF_A_SUMMARY = 3
"""Most curves of which a caption tells each."""
LARGEST_COUNT = 4
"""Largest number of an axis of counts that plotly would mark with fractions."""
POINTS_OF_A_CURVE = 800
"""Most points of one curve, about."""


def html_page(title: str, body: Iterable[str], head: Iterable[str] = ()) -> str:
    """Return a page with the style of all pages.

    Args:
        title: title of the page, as plain text.
        body: lines of HTML.
        head: further lines of HTML for the page's head.

    """
    lines = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        *head,
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>",
        *body,
        "</body>\n</html>",
    ]
    return "\n".join(lines) + "\n"


def html_table(name: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table of plain texts; the first cell of each row is its heading. Columns may have no titles.

    Screen readers tell tables apart by their `name`.
    """
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
    headings = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    if headings:
        yield f"<thead><tr>{headings}</tr></thead>"
    yield "<tbody>"
    for heading, *texts in rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        yield f'<tr><th scope="row">{escape(heading)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def html_section(name: str, title: str, content: Iterable[str]) -> str:
    """Return a section with its heading; `name` is what links lead to."""
    return "\n".join([f'<section id="{name}">\n<h2>{escape(title)}</h2>', *content, "</section>"])


def points_to_draw(values: Sequence[float], most_points: int) -> list[int]:
    """Return the places of the points of a curve that are drawn.

    The curve is cut into pieces of equal length, and each keeps its least and its greatest value. A piece without any
    keeps its first point, so that the gap is seen.

    Args:
        values: the curve; NaN: there is no value.
        most_points: number of points that is about the most, at least 4.

    Returns:
        All places if there are no more than that; otherwise some of them, in order, with the first and the last one.

    """
    if len(values) <= most_points:
        return list(range(len(values)))
    drawn = {0, len(values) - 1}
    for piece in cut(len(values), (most_points - 2) // 2):
        present_points = [point for point in piece if not math.isnan(values[point])]
        if present_points:
            drawn.add(min(present_points, key=values.__getitem__))
            drawn.add(max(present_points, key=values.__getitem__))
        else:
            drawn.add(piece[0])
    return sorted(drawn)


def spread(elements: Sequence[T], most_elements: int) -> list[T]:
    """Return evenly spread elements, with the first and the last one; all if there are no more than `most_elements`."""
    if len(elements) <= most_elements:
        return list(elements)
    step = (len(elements) - 1) / (most_elements - 1)
    return [elements[round(number * step)] for number in range(most_elements)]


def cut(length: int, most_pieces: int) -> Iterator[range]:
    """Cut the places of a list into pieces of equal length, as far as possible: at most so many, of one at least."""
    pieces = min(length, max(1, most_pieces))
    for piece in range(pieces):
        yield range(piece * length // pieces, (piece + 1) * length // pieces)


class NumberFormat(NamedTuple):
    """Formats of plotly.js for the ticks of an axis and for a value, and the unit behind them."""

    tick: str
    value: str
    suffix: str


FORMATS: dict[Unit, NumberFormat] = {
    "": NumberFormat("", ".6~g", ""),
    "%": NumberFormat(".2~%", ".2~%", ""),
    "s": NumberFormat("", ",.4~f", " s"),
    "B": NumberFormat(".3~s", ".4~s", "B"),
    "1/s": NumberFormat(".3~s", ".4~s", "/s"),
    "tokens": NumberFormat("", ",.2~f", " tokens"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A curve; both lists have one element for each point, and a value that is missing is NaN."""

    label: str
    rounds: Sequence[float]
    """Numbers of rounds, counted from one."""
    values: Sequence[float]
    dashed: bool = False
    colour: str | None = None
    """Colour of `COLOURS`; None: the next one of the chart."""


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
    for name, label in series.labels_of(chart).items():
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
    traces: list[Trace] = []
    summaries: list[str] = []
    is_thinned = False
    for line, colour in zip(lines, cycle(COLOURS), strict=False):
        points = points_to_draw(line.values, most_points)
        is_thinned |= len(points) < len(line.values)
        traces.append(_line_trace(line, points, line.colour or colour, unit))
        summaries.append(_summary(line, unit))
    summary = "; ".join(summaries)
    if len(lines) > CURVES_OF_A_SUMMARY:
        summary = counted(len(lines), "curve")
    has_zero = bool(unit) or all(map(_is_level, lines))
    axis: dict[str, Any] = {
        "tickformat": FORMATS[unit].tick,
        "ticksuffix": FORMATS[unit].suffix,
        "rangemode": "tozero" if has_zero else "normal",
    }
    if not unit and _are_small_counts(lines):
        axis["dtick"] = 1  # There is no half of a worker.
    hover = "closest" if is_thinned else "x unified"
    layout = {"yaxis": axis, "hovermode": hover, "showlegend": len(lines) > 1}
    return ReportFigure(title, summary, traces, layout, thinned=is_thinned)


def _are_small_counts(lines: Sequence[Line]) -> bool:
    """Whether all values are whole numbers, at most `LARGEST_COUNT`."""
    values: set[float] = set()
    for line in lines:
        values.update(line.values)
    return all(math.isnan(value) or value in range(LARGEST_COUNT + 1) for value in values)


def _line_trace(line: Line, points: Sequence[int], colour: str, unit: Unit) -> Trace:
    """Return the trace of a curve with some of its points."""
    number_format = FORMATS[unit]
    stroke = {"color": colour, "width": 2, "dash": "dash" if line.dashed else "solid"}
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) <= MOST_MARKERS else "lines",
        "name": escape(line.label),
        "x": [line.rounds[point] for point in points],
        "y": [_number_or_none(line.values[point]) for point in points],
        "line": stroke,
        "marker": {"size": 5},
        "hovertemplate": f"%{{y:{number_format.value}}}{number_format.suffix}",
    }


def _is_level(line: Line) -> bool:
    """Whether a curve never changes, so that only zero gives its axis a scale."""
    return len(set(_present(line))) < 2


def _present(line: Line) -> list[float]:
    """Values of a curve that aren't missing."""
    return [value for value in line.values if not math.isnan(value)]


def _summary(line: Line, unit: Unit) -> str:
    """Text about a curve: its first and last values, and its least and greatest ones."""
    present_values = _present(line)
    if not present_values:
        return line.label
    first_text = value_text(present_values[0], unit)
    last_text = value_text(present_values[-1], unit)
    least_text = value_text(min(present_values), unit)
    greatest_text = value_text(max(present_values), unit)
    if least_text == greatest_text:
        return f"{line.label} {last_text}"
    text = f"{line.label} {first_text} → {last_text}"
    if {least_text, greatest_text} <= {first_text, last_text}:
        return text
    return f"{text}, between {least_text} and {greatest_text}"


def value_text(value: float, unit: Unit) -> str:
    """Write a value with its unit, in one style for the whole page."""
    text = f"{value:.5g}"
    match unit:
        case "%":
            text = f"{value:.1%}"
        case "s":
            text = duration(value) if value >= 1 else f"{value:.3g}s"
        case "B":
            text = f"{si(value)}B"
        case "1/s":
            text = f"{si(value)}/s"
        case "tokens":
            text = f"{value:.4g} tokens"
    return text


def _number_or_none(value: float) -> float | None:
    """Return a number as JSON has it; None for NaN."""
    return None if math.isnan(value) else value


def traffic_figures(series: Series, most_points: int) -> Iterator[ReportFigure]:
    """Draw the bytes of each direction, in each round and so far, and what encoding has cost."""
    exchange_figure, encoding = TRAFFIC
    lines = lines_of(series, exchange_figure)
    totals = []
    for line in lines:
        totals.append(Line(line.label, line.rounds, running_totals(line.values)))
    unsent = every_step_bytes(series)
    if totals and unsent:
        label = "up, if gradients were exchanged at every step"
        totals.append(Line(label, series.numbers, unsent, dashed=True))
    so_far = line_figure("Bytes so far", "B", totals, most_points)
    if so_far is not None and unsent:
        axis = so_far.layout["yaxis"]
        axis["type"] = "log"
        if unsent[-1] >= 100 * totals[0].values[0] > 0:
            axis["dtick"] = 1  # Powers of ten alone: marks between them have no unit.
    encoding_lines = lines_of(series, encoding)
    for figure in (
        line_figure(exchange_figure.title, exchange_figure.unit, lines, most_points),
        so_far,
        line_figure(encoding.title, encoding.unit, encoding_lines, most_points),
    ):
        if figure is not None:
            yield figure


def node_rows(series: Series, with_hosts: bool) -> list[tuple[str, str]]:
    """Return the bytes that were read from each data node; without hosts, nodes have numbers for names."""
    total: Counter[str] = Counter()
    for record in series.rounds:
        total.update(record.get("bytes_from") or {})
    rows = []
    for number, (node, size_bytes) in enumerate(total.most_common(), start=1):
        name = f"data node {number}"
        if with_hosts:
            name = node
        rows.append((name, f"{si(size_bytes)}B"))
    return rows


def chart_grid(charts: Sequence[ReportFigure], figures: list[ReportFigure]) -> Iterator[str]:
    """Lines of HTML with places for charts, which are added to `figures`, in the order of `chart_scripts`."""
    if not charts:
        return
    yield '<div class="charts">'
    for chart in charts:
        title = escape(chart.title)
        caption = escape(chart.summary)
        if chart.thinned:
            caption += ". Thinned: ends and extremes are kept"
        yield '<figure class="wide">' if chart.wide else "<figure>"
        yield f"<figcaption><h3>{title}</h3><p>{caption}</p></figcaption>"
        label = f'role="img" aria-label="{title}: {caption}"'
        height = f'data-height="{chart.height_px}" style="height:{chart.height_px}px"'
        yield f'<div class="plot" data-figure="{len(figures)}" {height} {label}></div>'
        yield "</figure>"
        figures.append(chart)
    yield "</div>"


def chart_scripts(figures: Sequence[ReportFigure]) -> Iterator[str]:
    """Lines of HTML with the charts, the library that draws them, and the page's own script."""
    data = [{"data": figure.data, "layout": figure.layout} for figure in figures]
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # So no text of a record can end the script.
        text = text.replace(character, f"\\u{ord(character):04x}")
    yield f'<script type="application/json" id="figure-data">{text}</script>'
    library = pkgutil.get_data("plotly", "package_data/plotly.min.js")
    assert library is not None
    yield f"<script>{library.decode()}</script>"
    yield f"<script>\n{_SCRIPT.read_text(encoding='utf-8')}</script>"
