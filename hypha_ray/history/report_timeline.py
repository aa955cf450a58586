"""Charts of a run's workers, round by round: use of their time, what came and went, batches, and shares of all time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple, TypeAlias

from hypha_ray.history.report_charts import ReportFigure, Trace, cut, spread, value_text
from hypha_ray.telemetry.series import Series
from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.texts import counted

MOST_WORKERS = 64
MOST_SEGMENTS = 5000
"""Most segments of the timeline, about."""
MOST_COLUMNS = 400
"""Most columns of a chart by round; each has one round, or several neighbours added up."""
MOST_MARKS = 300
"""Most marks of a kind of event."""
TEXT_HEIGHT_PX = 120
ROW_HEIGHT_PX = 22
"""Height of a chart with a row for each worker: of legend and axis, and of a row."""

Hide: TypeAlias = Callable[[object], str]
"""Function that makes a text of a record fit for the page."""


class Use(NamedTuple):
    """Look of a use of time: its label, and its colour."""

    label: str
    colour: str


USES = {
    "start": Use("starting", "--grey"),
    "training": Use("training", "--green"),
    "data": Use("waiting for data", "--sky"),
    "barrier": Use("waiting for others", "--orange"),
    "exchange": Use("exchanging", "--blue"),
    "evaluation": Use("evaluating", "--purple"),
    "loss": Use("lost", "--red"),
}
"""Uses of time, by their names in records, in the order in which a round shows them."""


class MarkStyle(NamedTuple):
    """Look of an event of a worker: its verb, its name in the legend, its symbol, and its colour."""

    verb: str
    label: str
    symbol: str
    colour: str


MARKS = {
    "join": MarkStyle("joined", "joined", "triangle-up", "--green"),
    "loss": MarkStyle("was lost", "worker lost", "x", "--red"),
    "leave": MarkStyle("left", "left", "triangle-down", "--orange"),
    "exclude": MarkStyle("was excluded", "excluded", "square", "--purple"),
}
"""Events of workers that are shown, by their kind."""


@dataclass(frozen=True, slots=True)
class RoundColumn:
    """Neighbouring rounds that are shown as one column."""

    records: Sequence[Record]

    @property
    def first(self) -> int:
        """Number of the first round, counted from one."""
        return int(self.records[0]["round"]) + 1

    @property
    def last(self) -> int:
        """Number of the last round, counted from one."""
        return int(self.records[-1]["round"]) + 1

    @property
    def begin(self) -> float:
        """Edge at which the column begins; a round has its number at its middle."""
        return self.first - 0.5

    @property
    def end(self) -> float:
        """Edge at which the column ends."""
        return self.last + 0.5

    @property
    def label(self) -> str:
        """Text that names the rounds."""
        if self.first == self.last:
            return f"round {self.first}"
        return f"rounds {self.first}-{self.last}"

    def seconds(self, worker: str) -> dict[str, float]:
        """Seconds of a worker by use."""
        total: dict[str, float] = {}
        for record in self.records:
            times_by_worker = record.get("time_by_worker") or {}
            worker_times = times_by_worker.get(worker) or {}
            for use, seconds in worker_times.items():
                total[use] = total.get(use, 0.0) + seconds
        return total

    def shares(self) -> dict[str, float]:
        """Shares of the fleet's time by use; none if the records don't have them."""
        total: dict[str, float] = {}
        all_s = 0.0
        for record in self.records:
            fleet_s = record.get("fleet_s") or 0.0
            shares = record.get("time_shares") or {}
            for use, share in shares.items():
                total[use] = total.get(use, 0.0) + share * fleet_s
                all_s += share * fleet_s
        return {use: seconds / all_s for use, seconds in total.items() if all_s > 0}

    def batches(self, worker: str) -> int:
        """Number of batches of a worker."""
        total = 0
        for record in self.records:
            batches_by_worker = record.get("batches") or {}
            total += int(batches_by_worker.get(worker, 0))
        return total


class Mark(NamedTuple):
    """An event of a worker, and the round in which it happened, counted from one."""

    kind: str
    worker: str
    round: float
    text: str


def columns_of(rounds: Sequence[Record], most_columns: int) -> list[RoundColumn]:
    """Return rounds as columns, at most so many."""
    columns = []
    for places in cut(len(rounds), most_columns):
        columns.append(RoundColumn(rounds[places.start : places.stop]))
    return columns


def timeline(series: Series, events: Iterable[Record], hide: Hide) -> ReportFigure | None:
    """Draw each worker's time round by round, with what came and went; None if nothing is known of workers.

    Args:
        series: the run's rounds.
        events: events of the run, in order.
        hide: makes the reasons of events fit for the page.

    """
    marks = list(_marks(events, hide))
    workers = _workers(series, marks)
    if not workers:
        return None
    shown_workers = workers[:MOST_WORKERS]
    most_columns = MOST_SEGMENTS // (5 * len(shown_workers))
    columns = columns_of(series.rounds, min(MOST_COLUMNS, most_columns))
    bars = _time_traces(columns, shown_workers)
    return ReportFigure(
        "Workers",
        _timeline_summary(workers, has_time=bool(bars)),
        [*bars, *_mark_traces(marks, shown_workers)],
        {
            "barmode": "overlay",
            "bargap": 0.25,
            "hovermode": "closest",
            "showlegend": True,
            "xrange": _edges(columns),
            "yaxis": _worker_axis(shown_workers),
        },
        height_px=_height_px(shown_workers),
        wide=True,
        thinned=len(columns) < len(series.rounds),
    )


def _timeline_summary(workers: Sequence[str], has_time: bool) -> str:
    text = counted(len(workers), "worker")
    if len(workers) > MOST_WORKERS:
        text += f", of which the first {MOST_WORKERS} are shown"
    if has_time:
        return f"{text}; a round is as wide as its busiest worker's time, and uses of time aren't in their order"
    return f"{text}; the records don't tell what their time was spent on"


def _edges(columns: Sequence[RoundColumn]) -> list[float]:
    """Range of the axis of rounds."""
    if not columns:
        return [0.4, 1.6]
    return [columns[0].begin - 0.1, columns[-1].end + 0.1]


def _worker_axis(workers: Sequence[str]) -> dict[str, Any]:
    """Axis with a row for each worker, the first one at the top."""
    return {"type": "category", "categoryarray": list(map(_name, workers)), "autorange": "reversed"}


def _height_px(workers: Sequence[str]) -> int:
    return TEXT_HEIGHT_PX + ROW_HEIGHT_PX * max(3, len(workers))


def _name(worker: str) -> str:
    return f"worker {escape(worker)}"


def _marks(events: Iterable[Record], hide: Hide) -> Iterator[Mark]:
    """Events of workers; each is in the round whose plans went out last."""
    current_round = 0.5
    for event in events:
        kind = str(event.get("kind"))
        round_number = event.get("round")
        if kind == "plan" and isinstance(round_number, int):
            current_round = max(current_round, round_number + 1.0)
        elif kind in MARKS and event.get("worker") is not None:
            reason = hide(event.get("reason") or event.get("device") or "")
            time_text = f"in round {current_round:.0f}"
            if current_round < 1:
                time_text = "before the first round"
            yield Mark(kind, str(event["worker"]), current_round, f"{time_text}: {reason}")


def _workers(series: Series, marks: Iterable[Mark]) -> list[str]:
    """Workers of all rounds and events, in the order of their numbers."""
    names = set(series.workers)
    names.update(mark.worker for mark in marks)
    for record in series.rounds:
        names.update(record.get("time_by_worker") or {})
    return sorted(names, key=lambda name: (len(name), name))


def _time_traces(columns: Sequence[RoundColumn], workers: Sequence[str]) -> list[Trace]:
    """Return a trace of bars for each use of time that there is."""
    traces: dict[str, Trace] = {}
    for use, style in USES.items():
        traces[use] = _bars(style)
    for column in columns:
        seconds_by_worker = {worker: column.seconds(worker) for worker in workers}
        longest_s = max(map(_total, seconds_by_worker.values()))
        if longest_s > 0:
            width_of_a_second = (column.end - column.begin) / longest_s
            for worker, seconds in seconds_by_worker.items():
                _add_bars(traces, column, worker, seconds, width_of_a_second)
    return [trace for trace in traces.values() if trace["x"]]


def _total(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def _bars(style: Use) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": style.label,
        "base": [],
        "x": [],
        "y": [],
        "customdata": [],
        "marker": {"color": style.colour},
        "hovertemplate": f"%{{y}}, %{{customdata}} {style.label}<extra></extra>",
    }


def _add_bars(
    traces: Mapping[str, Trace],
    column: RoundColumn,
    worker: str,
    seconds: Mapping[str, float],
    width_of_a_second: float,
) -> None:
    """Add the bars of a worker's column, one behind the other."""
    begin = column.begin
    for use, trace in traces.items():
        if seconds.get(use):
            width = seconds[use] * width_of_a_second
            time = value_text(seconds[use], "s")
            trace["base"].append(round(begin, 4))
            trace["x"].append(round(width, 4))
            trace["y"].append(_name(worker))
            trace["customdata"].append(f"{column.label}: {time}")
            begin += width


def _mark_traces(marks: Iterable[Mark], workers: Sequence[str]) -> list[Trace]:
    """Return a trace of symbols for each kind of event that there is."""
    marks_by_kind: dict[str, list[Mark]] = {}
    for mark in marks:
        if mark.worker in workers:
            marks_by_kind.setdefault(mark.kind, []).append(mark)
    traces = []
    for kind, style in MARKS.items():
        if kind in marks_by_kind:
            traces.append(_mark_trace(style, spread(marks_by_kind[kind], MOST_MARKS)))
    return traces


def _mark_trace(style: MarkStyle, marks: Sequence[Mark]) -> Trace:
    edge = {"width": 1.5, "color": "--panel"}
    trace: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": style.label,
        "x": [],
        "y": [],
        "text": [],
        "marker": {"symbol": style.symbol, "size": 10, "color": style.colour, "line": edge},
        "hovertemplate": f"%{{y}} {style.verb} %{{text}}<extra></extra>",
    }
    for mark in marks:
        trace["x"].append(mark.round)
        trace["y"].append(_name(mark.worker))
        trace["text"].append(escape(mark.text))
    return trace


def batches_figure(series: Series) -> ReportFigure | None:
    """Draw the batches of each worker in each round; None if the records have none."""
    workers = series.workers[:MOST_WORKERS]
    if not workers:
        return None
    columns = columns_of(series.rounds, min(MOST_COLUMNS, MOST_SEGMENTS // len(workers)))
    rows = []
    for worker in workers:
        rows.append([column.batches(worker) for column in columns])
    is_thinned = len(columns) < len(series.rounds)
    total = sum(map(sum, rows))
    summary = f"{total} batches of {counted(len(workers), 'worker')}"
    if len(series.workers) > len(workers):
        summary += f", the first ones of {len(series.workers)}"
    trace = _heat_trace(columns, workers, rows)
    layout = {"yaxis": _worker_axis(workers), "hovermode": "closest"}
    height_px = _height_px(workers)
    return ReportFigure("Batches of each worker", summary, [trace], layout, height_px, wide=True, thinned=is_thinned)


def _heat_trace(columns: Sequence[RoundColumn], workers: Sequence[str], rows: list[list[int]]) -> Trace:
    """Return a field of colours, with a row for each worker and a column for each of `columns`."""
    edges = [columns[0].begin]
    labels = []
    for column in columns:
        edges.append(column.end)
        labels.append(column.label)
    has_gaps = len(columns) <= 60
    return {
        "type": "heatmap",
        "x": edges,
        "y": list(map(_name, workers)),
        "z": rows,
        "zmin": 0,
        "zmax": max(1, *map(max, rows)),
        "customdata": [labels] * len(workers),
        "colorscale": [[0, "--heat-low"], [1, "--heat-high"]],
        "colorbar": {"thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}, %{customdata}: %{z} batches<extra></extra>",
        "xgap": int(has_gaps),
        "ygap": 1,
    }


def shares_figure(series: Series) -> ReportFigure | None:
    """Draw the uses of the fleet's time by round; None if the records don't have them."""
    all_columns = columns_of(series.rounds, MOST_COLUMNS)
    shares_by_column = [(column, column.shares()) for column in all_columns]
    columns = [(column, shares) for column, shares in shares_by_column if shares]
    if not columns:
        return None
    traces = []
    for use, style in USES.items():
        traces.append(_share_trace(use, style, columns))
    layout = {
        "barmode": "stack",
        "hovermode": "closest",
        "showlegend": True,
        "xrange": _edges([column for column, _ in columns]),
        "yaxis": {"tickformat": ".0%", "range": [0, 1]},
    }
    summary = "all time of the fleet, from the first machine on"
    is_thinned = len(all_columns) < len(series.rounds)
    return ReportFigure("Use of time", summary, traces, layout, height_px=300, wide=True, thinned=is_thinned)


def _share_trace(use: str, style: Use, columns: Iterable[tuple[RoundColumn, Mapping[str, float]]]) -> Trace:
    trace: Trace = {
        "type": "bar",
        "name": style.label,
        "x": [],
        "width": [],
        "y": [],
        "customdata": [],
        "marker": {"color": style.colour},
        "hovertemplate": f"%{{customdata}}: %{{y:.2~%}} {style.label}<extra></extra>",
    }
    for column, shares in columns:
        trace["x"].append((column.begin + column.end) / 2)
        trace["width"].append(column.end - column.begin)
        trace["y"].append(shares.get(use, 0.0))
        trace["customdata"].append(column.label)
    return trace
