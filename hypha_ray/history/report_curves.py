"""Curves of a run's page that take more than a table of charts: objective, gradients, traffic, cost, and others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain

from hypha_ray.history.report_charts import Line, ReportFigure, line_figure, lines_of
from hypha_ray.telemetry.charts import ALL_CHARTS, TRAFFIC, Chart
from hypha_ray.telemetry.series import Series, every_step_bytes, gradient_norms, running_totals
from hypha_ray.telemetry.sinks.table import si

_NOT_CURVES = {
    *("round", "rounds", "epoch", "time_s", "elapsed_s", "eta_s", "fleet_s", "cost", "loss"),
    *("samples", "tokens", "scored", "possible_samples", "arrivals"),
    *("samples_total", "tokens_total"),
}
"""Numbers of a round's record that say nothing as a curve, or are shown elsewhere."""


def objective_lines(series: Series) -> list[Line]:
    """Return the curves of training and of evaluations by the run's objective."""
    objective = series.objective
    lines = []
    if series.has(objective.trained):
        trained = series.column(objective.trained)
        lines.append(Line(f"{objective.trained}, training", series.numbers, trained))
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


def traffic_figures(series: Series, most_points: int) -> Iterator[ReportFigure]:
    """Draw the bytes of each direction, in each round and so far, and what encoding has cost."""
    each, encoding = TRAFFIC
    lines = lines_of(series, each)
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
        line_figure(each.title, each.unit, lines, most_points),
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


def cost_lines(series: Series) -> list[Line]:
    """Return the curves of the cost in each round, and so far."""
    if not series.has("cost"):
        return []
    costs = series.column("cost")
    totals = running_totals(costs)
    return [Line("since the record before", series.numbers, costs), Line("so far", series.numbers, totals)]
