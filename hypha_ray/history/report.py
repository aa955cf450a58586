"""Page of one run: figures, curves, workers round by round, traffic, costs, events, responses, settings, provenance.

The page is one HTML file that asks no server for anything, of a run that has ended or still goes on. Numbers are those
of the run's own records. Long curves and lists are thinned, and the page says so.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from hypha_ray.errors import DataError, reason_of
from hypha_ray.files import opener
from hypha_ray.history import report_sections as sections
from hypha_ray.history.account import RunFiles, reason_of_state, training_of
from hypha_ray.history.comparison import figures_of_run
from hypha_ray.history.host_filter import HostFilter
from hypha_ray.history.html_page import html_page, html_section, html_table
from hypha_ray.history.overview import (
    RECORD_ERRORS,
    State,
    committed_rounds,
    state_at_rest,
    state_of,
    text_of,
    total_of,
)
from hypha_ray.history.report_charts import MOST_POINTS, POINTS_OF_A_CURVE, ReportFigure, figures_of, line_figure
from hypha_ray.history.report_lists import event_list, rollout_list
from hypha_ray.history.report_timeline import batches_figure, shares_figure, timeline
from hypha_ray.telemetry.caption import caption_of
from hypha_ray.telemetry.charts import FLEET, OPTIMIZATION, PLAN, POLICY, SPEED, TRAFFIC, WAITING, Chart
from hypha_ray.telemetry.series import Series
from hypha_ray.telemetry.sinks.files import METRICS, SUMMARY, read_json

REPORT = "report.html"
"""Name of the page in a run's directory."""
_SCRIPT = Path(__file__).with_name("report.js")
_STEPS_BYTES = 64 << 20
"""Size of the metrics up to which the reports of workers are read for the norms of gradients."""
_CHARTED: tuple[tuple[Chart, ...], ...] = (OPTIMIZATION, POLICY, SPEED, WAITING, PLAN, TRAFFIC, FLEET)


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a page is made of."""

    run: RunFiles
    series: Series
    state: State
    hide: HostFilter
    has_steps: bool
    """Whether reports of workers were read."""

    @classmethod
    def read(cls, folder: Path, with_hosts: bool, at_end: bool) -> RunReport:
        """Read a run; arguments are those of `report_of`.

        Raises:
            OSError: a file can't be read.

        """
        metrics = folder / METRICS
        has_steps = not metrics.exists() or metrics.stat().st_size <= _STEPS_BYTES
        run = RunFiles.read_all(folder, has_steps)
        series = Series(run.metrics, read_json(folder / SUMMARY))
        state = State.DAMAGED
        if run.tables:
            last_round = series.rounds[-1] if series.rounds else {}
            total_rounds = total_of(run.tables, last_round)
            judge = state_at_rest if at_end else state_of
            state = judge(folder, committed_rounds(folder), total_rounds, run.events)
        hide = HostFilter(run.provenance, run.events, is_on=not with_hosts)
        return cls(run, series, state, hide, has_steps)


def report_of(folder: Path, with_hosts: bool = False, at_end: bool = False) -> bytes:
    """Return the page of a run.

    Args:
        folder: directory of the run.
        with_hosts: whether users, machines and addresses are shown.
        at_end: whether the caller is the run's driver, which still holds its lock.

    Raises:
        DataError: DATA044, a file can't be read, or has a record of another program.

    """
    try:
        report = RunReport.read(folder, with_hosts, at_end)
        body = list(_body(report))
        title = caption_of(folder, _first_record(report))
    except OSError as error:
        got = f"{error.filename or folder}: {error.strerror}"
        raise DataError("DATA044", f"the files of {folder} can't be read", got, fix="see to it") from None
    except RECORD_ERRORS as error:
        problem = f"{folder} has a record that can't be understood"
        raise DataError("DATA044", problem, reason_of(error), fix="take away what hypha_ray didn't write") from None
    return html_page(title, body).encode(errors="backslashreplace")


def write_report(folder: Path, at_end: bool = False, with_hosts: bool = False) -> Path:
    """Write the page of a run into its directory, readable only for its owner.

    Raises:
        DataError: DATA044, the run can't be read, or the page not written.

    """
    path = folder / REPORT
    content = report_of(folder, with_hosts, at_end)
    draft = path.with_name(f".{REPORT}.part")
    try:
        with open(draft, "wb", opener=opener) as file:
            file.write(content)
        draft.replace(path)
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise DataError("DATA044", "the report can't be written", got, fix="see to it, or name a file") from None
    return path


def _first_record(report: RunReport) -> dict[str, object]:
    """Record from which the date of a run is taken."""
    for record in (*report.run.events[:1], *report.series.rounds[:1]):
        return dict(record)
    return {}


def _body(report: RunReport) -> Iterator[str]:
    figures: list[ReportFigure] = []
    parts = list(_sections(report, figures))
    yield from _header(report)
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in parts)
    yield f'<nav aria-label="sections"><ul>{links}</ul></nav>\n<main>'
    if figures:
        yield '<noscript><p class="note">The charts need JavaScript.</p></noscript>'
    for name, title, content in parts:
        yield html_section(name, title, content)
    yield "</main>"
    written = datetime.now(UTC).strftime("%d %B %Y, %H:%M")
    yield f"<footer><p>Written on {written} UTC by hypha_ray. Rounds are counted from one.</p></footer>"
    if figures:
        yield from _scripts(figures)


def _header(report: RunReport) -> Iterator[str]:
    run = report.run
    rounds = committed_rounds(run.folder)
    last_round = report.series.rounds[-1] if report.series.rounds else {}
    total = text_of(total_of(run.tables, last_round), absent="?")
    reason = report.hide(reason_of_state(run, report.state))
    yield f'<header>\n<h1>{escape(run.folder.name)} <span class="state {report.state}">{report.state}</span></h1>'
    if run.tables:
        yield f'<p class="lead">{escape(report.hide(training_of(run)))}</p>'
    yield f'<p class="lead">{rounds} of {total} rounds{escape(reason)}</p>\n</header>'


def _sections(report: RunReport, figures: list[ReportFigure]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, title and content of each section that the run has; charts are added to `figures`."""
    series = report.series
    run = report.run
    if series.rounds:
        yield "figures", "Figures", list(sections.tiles(figures_of_run(run)))
    for name, title, charts in _chart_sections(report):
        content = list(_chart_grid(charts, figures))
        if name == "time" and series.rounds:
            shares = figures_of_run(run).get("time_shares")
            content = [*(sections.shares_bar(shares) if shares else ()), *content]
        if name == "traffic":
            rows = sections.node_rows(series, not report.hide.is_on)
            content += html_table(("read from", "bytes"), rows) if rows else ()
        if content:
            yield name, title, content
    for name, title, lines in (
        ("events", "Events", event_list(run.events, report.hide)),
        ("responses", "Responses and rewards", rollout_list(run.folder)),
    ):
        content = list(lines)
        if content:
            yield name, title, content
    if run.tables:
        rows = sections.setting_rows(run.tables, report.hide)
        yield "settings", "Settings that differ from defaults", list(html_table(("key", "value", "default"), rows))
    provenance = list(sections.provenance_rows(run, report.hide, not report.hide.is_on))
    if provenance:
        yield "provenance", "Provenance", list(html_table(("", ""), provenance))


def _chart_sections(report: RunReport) -> Iterator[tuple[str, str, list[ReportFigure]]]:
    """Yield name, title and charts of the sections with charts."""
    series = report.series
    quality = _quality_lines(report)
    known = [name for charts in _CHARTED for chart in charts for name in chart.labels]
    further = sections.further_fields(series, known) if series.rounds else []
    curves = 30 + len(quality) + len(further)
    most_points = max(40, min(POINTS_OF_A_CURVE, MOST_POINTS // curves))
    charts = [line_figure(title, "", lines, most_points) for title, lines in quality]
    present = [figure for figure in charts if figure is not None]
    yield "curves", "Curves", [*present, *figures_of(series, (*OPTIMIZATION[1:], *POLICY), most_points)]
    workers = [timeline(series, report.run.events, report.hide), batches_figure(series)]
    drawn = [figure for figure in workers if figure is not None]
    yield "workers", "Workers", [*drawn, *figures_of(series, FLEET[:1], most_points)]
    yield "plan", "Plan and actual", list(figures_of(series, PLAN, most_points))
    shares = [figure for figure in (shares_figure(series),) if figure is not None]
    yield "time", "Time", [*shares, *figures_of(series, (*FLEET[1:], *SPEED, *WAITING), most_points)]
    yield "traffic", "Traffic", list(sections.traffic_figures(series, most_points))
    cost = line_figure("Cost, in the owners' unit", "", sections.cost_lines(series), most_points)
    yield "cost", "Cost", [] if cost is None else [cost]
    others = [Chart(name, "", {name: name}) for name in further]
    yield "further", "Further figures", list(figures_of(series, others, most_points))


def _quality_lines(report: RunReport) -> list[tuple[str, list[sections.Line]]]:
    """Titles and curves of the charts of training: the objective, the task, learning rate and gradients."""
    series = report.series
    (learning_rate, _) = OPTIMIZATION
    objective = series.objective.trained
    charts = [(objective.capitalize(), sections.objective_lines(series)), ("Task", sections.task_lines(series))]
    if objective != "loss" and series.has("loss"):
        charts.append(("Loss", [sections.Line("loss", series.numbers, series.column("loss"))]))
    charts.append((learning_rate.title, sections.lines_of(series, learning_rate)))
    steps = [record for record in report.run.metrics if record.get("kind") == "step"]
    charts.append(("Norm of the gradient before clipping", sections.gradient_lines(steps)))
    return charts


def _chart_grid(charts: Sequence[ReportFigure], figures: list[ReportFigure]) -> Iterator[str]:
    """Lines of HTML with places for charts, which are added to `figures`."""
    if not charts:
        return
    yield '<div class="charts">'
    for chart in charts:
        caption = chart.summary
        if chart.thinned:
            caption += ". Thinned: ends and extremes are kept"
        kind = ' class="wide"' if chart.wide else ""
        label = escape(f"{chart.title}: {chart.summary}", quote=True)
        yield f"<figure{kind}>\n<figcaption><h3>{escape(chart.title)}</h3><p>{escape(caption)}</p></figcaption>"
        place = f'data-figure="{len(figures)}" style="height:{chart.height_px}px" role="img" aria-label="{label}"'
        yield f'<div class="plot" {place}></div>\n</figure>'
        figures.append(chart)
    yield "</div>"


def _scripts(figures: Sequence[ReportFigure]) -> Iterator[str]:
    """Lines of HTML with the charts, the library that draws them, and the page's own script."""
    data = [{"data": figure.data, "layout": figure.layout} for figure in figures]
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":  # So no text of a record can end the script.
        text = text.replace(character, f"\\u{ord(character):04x}")
    yield f'<script type="application/json" id="figure-data">{text}</script>'
    library = pkgutil.get_data("plotly", "package_data/plotly.min.js")
    assert library is not None
    yield f"<script>{library.decode()}</script>"
    yield f"<script>\n{_SCRIPT.read_text(encoding='utf-8')}</script>"
