"""Page of one run: figures, curves, workers round by round, traffic, costs, events, responses, settings, provenance.

The page is one HTML file that asks no server for anything, of a run that has ended or still goes on. Numbers are those
of the run's own records. Long curves and lists are thinned, and the page says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from hypha_ray.errors import DataError, reason_of
from hypha_ray.files import opener
from hypha_ray.history.account import RunFiles, reason_of_state, training_of
from hypha_ray.history.overview import (
    State,
    committed_rounds,
    progress_of,
    readable,
    state_at_rest,
    state_of,
    total_of,
)
from hypha_ray.history.report_charts import (
    CONTENT_POLICY,
    MOST_POINTS,
    NO_SCRIPT,
    POINTS_OF_A_CURVE,
    Line,
    ReportFigure,
    chart_grid,
    chart_scripts,
    figures_of,
    html_page,
    html_section,
    html_table,
    line_figure,
    lines_of,
    node_rows,
    traffic_figures,
)
from hypha_ray.history.report_tables import (
    HostFilter,
    event_list,
    provenance_rows,
    rollout_list,
    setting_rows,
    shares_bar,
    tiles,
)
from hypha_ray.history.report_timeline import batches_figure, shares_figure, timeline
from hypha_ray.telemetry.series import (
    ALL_CHARTS,
    FLEET,
    GRADIENT_NORM,
    OPTIMIZATION,
    PLAN,
    POLICY,
    SPEED,
    WAITING,
    Chart,
    Series,
    caption_of,
    gradient_norms,
    running_totals,
)
from hypha_ray.telemetry.sinks.files import SUMMARY, Record, read_json

REPORT = "report.html"
"""Name of the page in a run's directory."""
LEAST_POINTS = 40
"""Fewest points of a long curve, about."""
_NOT_CURVES = {
    *("round", "rounds", "epoch", "time_s", "elapsed_s", "eta_s", "fleet_s", "cost", "loss"),
    *("samples", "tokens", "scored", "possible_samples", "arrivals"),
    *("samples_total", "tokens_total"),
}
"""Numbers of a round's record that say nothing as a curve, or are shown elsewhere."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """Contents of a page."""

    run: RunFiles
    series: Series
    state: State
    hide: HostFilter
    with_hosts: bool
    """Whether users, machines and addresses are shown."""

    @classmethod
    def read(cls, folder: Path, with_hosts: bool, at_end: bool) -> RunReport:
        """Read a run; arguments are those of `report_of`.

        Raises:
            OSError: a file can't be read.

        """
        run = RunFiles.read_all(folder)
        series = Series(run.metrics, read_json(folder / SUMMARY))
        state = State.DAMAGED
        if run.tables:
            total_rounds = total_of(run.tables, run.last_round)
            judge = state_at_rest if at_end else state_of
            state = judge(folder, committed_rounds(folder), total_rounds, run.figures["ended_early"])
        hide = HostFilter(run.provenance, run.events, is_on=not with_hosts)
        return cls(run, series, state, hide, with_hosts)


def report_of(folder: Path, with_hosts: bool = False, at_end: bool = False) -> bytes:
    """Return the page of a run.

    Args:
        folder: directory of the run.
        with_hosts: whether users, machines and addresses are shown.
        at_end: whether the caller is the run's driver, which still holds its lock.

    Raises:
        DataError: DATA044, a file can't be read, or has a record of another program.

    """
    with readable(folder):
        report = RunReport.read(folder, with_hosts, at_end)
        body = list(_body(report))
        title = report.hide(caption_of(folder, _first_record(report)))
    return html_page(title, body, [CONTENT_POLICY]).encode(errors="backslashreplace")


def head_of(folder: Path) -> str:
    """Return the head of a run's page as a small page of its own: state, training and figures, without a script.

    Raises:
        DataError: DATA044, a file can't be read, or has a record of another program.

    """
    with readable(folder):
        report = RunReport.read(folder, with_hosts=False, at_end=False)
        body = list(_header(report))
        if report.series.rounds:
            body += tiles(report.run.figures)
        title = caption_of(folder, _first_record(report))
    return html_page(title, body, [CONTENT_POLICY])


def write_report(folder: Path, at_end: bool = False, with_hosts: bool = False) -> Path:
    """Write the page of a run into its directory, readable only for its owner.

    Raises:
        DataError: DATA044, the run can't be read, or the page not written.

    """
    path = folder / REPORT
    content = report_of(folder, with_hosts, at_end)
    draft_file = path.with_name(f".{REPORT}.part")
    try:
        with open(draft_file, "wb", opener=opener) as file:
            file.write(content)
        draft_file.replace(path)
    except OSError as error:
        with suppress(OSError):  # On a full disk a part of the page would keep the disk full.
            draft_file.unlink()
        got = f"{path}: {error.strerror}"
        raise DataError("DATA044", "the report can't be written", got, fix="see to it, or name a file") from None
    return path


def notes_of_last_report(folder: Path) -> list[str]:
    """Write the page at the end of a run, by its driver; return a note if it can't be written."""
    try:
        write_report(folder, at_end=True)
    except DataError as error:  # The error's remedy is meant for a command.
        return [f"the report was not written: {error.got or error.what}"]
    except Exception as error:  # The model is saved: nothing about a page may fail the run.
        return [f"the report was not written: {reason_of(error)}"]
    return []


def _first_record(report: RunReport) -> Record:
    """Record from which the date of a run is taken; without fields if there is none."""
    records = [*report.run.events[:1], *report.series.rounds[:1], {}]
    return records[0]


def _body(report: RunReport) -> Iterator[str]:
    figures: list[ReportFigure] = []
    """Charts of all sections, in order."""
    all_sections = list(_sections(report, figures))
    yield from _header(report)
    links = ""
    for section in all_sections:
        links += f'<li><a href="#{section.name}">{escape(section.title)}</a></li>'
    yield f'<nav aria-label="sections"><ul>{links}</ul></nav>\n<main>'
    if figures:
        yield NO_SCRIPT
    for section in all_sections:
        yield html_section(section.name, section.title, section.content)
    now = datetime.now(UTC)
    yield f"</main>\n<footer><p>Written at {now:%Y-%m-%d %H:%M} UTC. Rounds are counted from one.</p></footer>"
    if figures:
        yield from chart_scripts(figures)


def _header(report: RunReport) -> Iterator[str]:
    run = report.run
    rounds = committed_rounds(run.folder)
    total_rounds = total_of(run.tables, run.last_round)
    progress = progress_of(rounds, total_rounds, len(run.rounds))
    reason = report.hide(reason_of_state(run, report.state))
    name = escape(run.folder.name)
    yield f'<header>\n<h1>{name} <span class="state {report.state}">{report.state}</span></h1>'
    if run.tables:
        training = report.hide(training_of(run))
        yield f'<p class="lead">{escape(training)}</p>'
    yield f'<p class="lead">{progress}{escape(reason)}</p>\n</header>'


class Section(NamedTuple):
    """A section of the page; `content` is lines of HTML."""

    name: str
    title: str
    content: list[str]


def _sections(report: RunReport, figures: list[ReportFigure]) -> Iterator[Section]:
    """Yield the sections that the run has; charts are added to `figures`."""
    for section in _all_sections(report, figures):
        if section.content:
            yield section


def _all_sections(report: RunReport, figures: list[ReportFigure]) -> Iterator[Section]:
    series = report.series
    run = report.run
    charts = _charts(report)
    summary: Record = {}
    if series.rounds:
        summary = run.figures
        yield Section("figures", "Figures", list(tiles(summary)))
    yield _chart_section("curves", "Curves", charts.curves, figures)
    yield _chart_section("workers", "Workers", charts.workers, figures)
    yield _chart_section("plan", "Plan and actual", charts.plan, figures)
    shares = summary.get("time_shares") or {}
    bar = list(shares_bar(shares)) if shares else []
    yield Section("time", "Time", [*bar, *chart_grid(charts.time, figures)])
    traffic = list(chart_grid(charts.traffic, figures))
    nodes = node_rows(series, report.with_hosts)
    if nodes:
        traffic += html_table("Data nodes", ("read from", "bytes"), nodes)
    yield Section("traffic", "Traffic", traffic)
    yield _chart_section("cost", "Cost", charts.cost, figures)
    yield _chart_section("further", "Further figures", charts.further, figures)
    yield Section("events", "Events", list(event_list(run.events, report.hide)))
    yield Section("responses", "Responses and rewards", list(rollout_list(run.folder)))
    if run.tables:
        settings = setting_rows(run.tables, report.hide)
        table = html_table("Settings", ("key", "value", "default"), settings)
        yield Section("settings", "Settings that differ from defaults", list(table))
    if run.provenance:
        provenance = provenance_rows(run.provenance, report.hide, report.with_hosts)
        yield Section("provenance", "Provenance", list(html_table("Provenance", (), provenance)))


def _chart_section(name: str, title: str, charts: Sequence[ReportFigure], figures: list[ReportFigure]) -> Section:
    """Return a section with nothing but charts, which are added to `figures`."""
    content = list(chart_grid(charts, figures))
    return Section(name, title, content)


@dataclass(frozen=True, slots=True)
class ReportCharts:
    """Charts of each section."""

    curves: list[ReportFigure]
    workers: list[ReportFigure]
    plan: list[ReportFigure]
    time: list[ReportFigure]
    traffic: list[ReportFigure]
    cost: list[ReportFigure]
    further: list[ReportFigure]


def _charts(report: RunReport) -> ReportCharts:
    series = report.series
    (learning_rate, *further_steps) = OPTIMIZATION
    (workers, goodput) = FLEET
    further_figures = further_charts(series)
    most_points = MOST_POINTS // (len(ALL_CHARTS) + len(further_figures))
    most_points = max(LEAST_POINTS, min(POINTS_OF_A_CURVE, most_points))
    curves = [
        line_figure(series.objective.trained.capitalize(), "", objective_lines(series), most_points),
        line_figure("Task", "", task_lines(series), most_points),
        line_figure("Loss", "", loss_lines(series), most_points),
        line_figure(learning_rate.title, learning_rate.unit, lines_of(series, learning_rate), most_points),
        line_figure(GRADIENT_NORM, "", gradient_lines(series), most_points),
        *figures_of(series, (*further_steps, *POLICY), most_points),
    ]
    fleet = [
        timeline(series, report.run.events, report.hide),
        batches_figure(series),
        *figures_of(series, [workers], most_points),
    ]
    time = [shares_figure(series), *figures_of(series, (goodput, *SPEED, *WAITING), most_points)]
    cost = [line_figure("Cost, in the owners' unit", "", cost_lines(series), most_points)]
    return ReportCharts(
        curves=_present(curves),
        workers=_present(fleet),
        plan=list(figures_of(series, PLAN, most_points)),
        time=_present(time),
        traffic=list(traffic_figures(series, most_points)),
        cost=_present(cost),
        further=list(figures_of(series, further_figures, most_points)),
    )


def _present(figures: Iterable[ReportFigure | None]) -> list[ReportFigure]:
    """Charts that the run has figures of."""
    return [figure for figure in figures if figure is not None]


def objective_lines(series: Series) -> list[Line]:
    """Return the curves of training and of evaluations by the run's objective."""
    objective = series.objective
    lines = []
    if series.has(objective.trained):
        trained_column = series.column(objective.trained)
        lines.append(Line(f"{objective.trained}, training", series.numbers, trained_column))
    if series.evaluations:
        numbers = []
        values = []
        for record in series.evaluations:
            numbers.append(record["round"] + 1)
            values.append(float(record[objective.name]))
        lines.append(Line(f"{objective.validated}, validation", numbers, values))
    return lines


def loss_lines(series: Series) -> list[Line]:
    """Return the curve of the loss of a run that has another objective."""
    if series.objective.trained == "loss" or not series.has("loss"):
        return []
    return [Line("loss", series.numbers, series.column("loss"))]


def task_lines(series: Series) -> list[Line]:
    """Return the curves of accuracy, metrics of the job, and shares of solved prompts."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for number, figures in series.tasks.items():
        for name, value in figures.items():
            numbers, values = curves.setdefault(name, ([], []))
            numbers.append(number + 1)
            values.append(value)
    return [Line(name, *curve) for name, curve in curves.items()]


def gradient_lines(series: Series) -> list[Line]:
    """Return the curves of the gradients' norms of the first workers."""
    return [Line(label, *points) for label, points in gradient_norms(series).items()]


def further_charts(series: Series) -> list[Chart]:
    """Return charts of numbers that rounds have and no table of charts has, such as the reward of each function."""
    charted = set(chain.from_iterable(chart.labels for chart in ALL_CHARTS))
    shown_elsewhere = {*charted, *_NOT_CURVES, series.objective.trained}
    names = _numbers_of(series, shown_elsewhere)
    return [Chart(name, "", {name: name}) for name in names]


def _numbers_of(series: Series, left_out: Collection[str]) -> list[str]:
    """Names of the numbers of all rounds, without some."""
    names: dict[str, None] = {}
    for record in series.rounds:
        for name, value in record.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name not in left_out:
                names[name] = None
    return list(names)


def cost_lines(series: Series) -> list[Line]:
    """Return the curves of the cost in each round, and so far."""
    if not series.has("cost"):
        return []
    costs = series.column("cost")
    totals = running_totals(costs)
    return [Line("since the record before", series.numbers, costs), Line("so far", series.numbers, totals)]
