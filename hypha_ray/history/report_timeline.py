"""Charts of a run's workers, round by round: use of their time, what came and went, batches, and shares of all time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from hypha_ray.fleet_time import TIME_KINDS
from hypha_ray.history.report_charts import ReportFigure, Trace, value_text
from hypha_ray.history.thinning import bins, spread
from hypha_ray.telemetry.series import Series
from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.texts import counted

USES = {
    "start": ("starting", "--grey"),
    "training": ("training", "--green"),
    "data": ("waiting for data", "--sky"),
    "barrier": ("waiting for others", "--orange"),
    "exchange": ("exchanging", "--blue"),
    "evaluation": ("evaluating", "--purple"),
    "loss": ("lost", "--red"),
}
"""Label and colour of each of `TIME_KINDS`, in the order in which a round shows them."""
assert set(USES) == set(TIME_KINDS)
MARKS = {
    "join": ("joined", "triangle-up", "--green"),
    "loss": ("lost", "x", "--red"),
    "leave": ("left", "triangle-down", "--orange"),
    "exclude": ("excluded", "square-x", "--purple"),
}
"""Label, symbol and colour of events of workers, by their kind."""
MOST_WORKERS = 64
MOST_SEGMENTS = 5000
"""Most segments of the timeline, about."""
MOST_BINS = 400
"""Most columns of a chart by round; each has one round, or several neighbours added up."""
MOST_MARKS = 300
"""Most marks of a kind of event."""

Hide: TypeAlias = Callable[[object], str]
"""Function that makes a text of a record fit for the page."""


@dataclass(frozen=True, slots=True)
class RoundBin:
    """Neighbouring rounds that are shown as one column."""

    records: Sequence[Record]

    @property
    def left(self) -> float:
        """Left edge; a round has its number, counted from one, at its middle."""
        return float(self.records[0]["round"]) + 0.5

    @property
    def right(self) -> float:
        """Right edge."""
        return float(self.records[-1]["round"]) + 1.5

    @property
    def label(self) -> str:
        """Text that names the rounds."""
        first = self.records[0]["round"] + 1
        last = self.records[-1]["round"] + 1
        return f"round {first}" if first == last else f"rounds {first}-{last}"

    def seconds(self, worker: str) -> dict[str, float]:
        """Seconds of a worker by use."""
        total: dict[str, float] = {}
        for record in self.records:
            used = (record.get("time_by_worker") or {}).get(worker) or {}
            for use, seconds in used.items():
                total[use] = total.get(use, 0.0) + seconds
        return total

    def shares(self) -> dict[str, float]:
        """Shares of the fleet's time by use; none if the records don't have them."""
        total: dict[str, float] = {}
        fleet_s = 0.0
        for record in self.records:
            if record.get("time_shares") and record.get("fleet_s"):
                fleet_s += record["fleet_s"]
                for use, share in record["time_shares"].items():
                    total[use] = total.get(use, 0.0) + share * record["fleet_s"]
        return {use: seconds / fleet_s for use, seconds in total.items()}


def timeline(series: Series, events: Iterable[Record], hide: Hide) -> ReportFigure | None:
    """Draw each worker's time round by round, with what came and went; None if nothing is known of workers.

    Args:
        series: the run's rounds.
        events: events of the run, in order.
        hide: makes the reasons of events fit for the page.

    """
    marks = list(_marks(events, hide))
    workers = _workers(series, marks)
    shown = workers[:MOST_WORKERS]
    columns = _columns(series.rounds, min(MOST_BINS, MOST_SEGMENTS // (5 * max(1, len(shown)))))
    traces = [trace for trace in _segments(columns, shown) if trace["x"]]
    has_time = bool(traces)
    for kind in MARKS:
        of_kind = [mark for mark in marks if mark.kind == kind and mark.worker in shown]
        if of_kind:
            traces.append(_mark_trace(kind, [of_kind[place] for place in spread(len(of_kind), MOST_MARKS)]))
    if not traces:
        return None
    parts = [counted(len(workers), "worker")]
    if len(workers) > len(shown):
        parts.append(f"the first {len(shown)} of them are shown")
    if has_time:
        parts.append("a round's width is the time of the busiest one, and uses within it aren't in their order")
    else:
        parts.append("the records don't tell what each one's time was spent on")
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xrange": [0.4, columns[-1].right + 0.1] if columns else [0.4, 1.6],
        "hovermode": "closest",
        "showlegend": True,
        "yaxis": {"type": "category", "categoryarray": [_name(worker) for worker in shown], "autorange": "reversed"},
    }
    is_thinned = len(columns) < len(series.rounds)
    height_px = 120 + 22 * max(3, len(shown))
    summary = ": ".join([parts[0], "; ".join(parts[1:])])
    return ReportFigure("Workers", summary, traces, layout, height_px, wide=True, thinned=is_thinned)


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of a worker, and the round in which it happened."""

    kind: str
    worker: str
    round: float
    text: str


def _marks(events: Iterable[Record], hide: Hide) -> Iterator[Mark]:
    """Events of workers; each is in the round whose plans went out last."""
    current = 0.5
    for event in events:
        kind = event.get("kind")
        if kind == "plan" and isinstance(event.get("round"), int):
            current = max(current, float(event["round"]) + 1)
        elif kind in MARKS and event.get("worker") is not None:
            reason = event.get("reason") or event.get("device") or ""
            yield Mark(kind, str(event["worker"]), current, hide(reason))


def _workers(series: Series, marks: Iterable[Mark]) -> list[str]:
    """Workers of all rounds and events, in the order of their numbers."""
    names = {*series.workers, *(mark.worker for mark in marks)}
    for record in series.rounds:
        names.update(record.get("time_by_worker") or {})
    return sorted(names, key=lambda name: (len(name), name))


def _columns(rounds: Sequence[Record], most: int) -> list[RoundBin]:
    return [RoundBin([rounds[place] for place in places]) for places in bins(len(rounds), max(1, most))]


def _segments(columns: Sequence[RoundBin], workers: Sequence[str]) -> list[Trace]:
    """Return a trace of bars for each use of time."""
    traces = {use: _bars(*style) for use, style in USES.items()}
    for column in columns:
        seconds_by_worker = {worker: column.seconds(worker) for worker in workers}
        longest_s = max((sum(seconds.values()) for seconds in seconds_by_worker.values()), default=0.0)
        if not longest_s:
            continue
        scale = (column.right - column.left) / longest_s
        for worker, seconds in seconds_by_worker.items():
            left = column.left
            for use, trace in traces.items():
                if seconds.get(use):
                    width = seconds[use] * scale
                    trace["base"].append(round(left, 4))
                    trace["x"].append(round(width, 4))
                    trace["y"].append(_name(worker))
                    trace["customdata"].append(f"{column.label}: {value_text(seconds[use], 's')}")
                    left += width
    return list(traces.values())


def _bars(label: str, colour: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "base": [],
        "x": [],
        "y": [],
        "customdata": [],
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}}, %{{customdata}} {label}<extra></extra>",
    }


def _mark_trace(kind: str, marks: Sequence[Mark]) -> Trace:
    label, symbol, colour = MARKS[kind]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label if kind != "loss" else "worker lost",
        "x": [mark.round for mark in marks],
        "y": [_name(mark.worker) for mark in marks],
        "text": [escape(mark.text) for mark in marks],
        "marker": {"symbol": symbol, "size": 10, "color": colour, "line": {"width": 1.5, "color": "--panel"}},
        "hovertemplate": f"%{{y}} {label} in round %{{x}}<br>%{{text}}<extra></extra>",
    }


def _name(worker: str) -> str:
    return f"worker {escape(worker)}"


def batches_figure(series: Series) -> ReportFigure | None:
    """Draw the batches of each worker in each round; None if the records have none."""
    workers = series.workers[:MOST_WORKERS]
    if not workers:
        return None
    columns = _columns(series.rounds, min(MOST_BINS, MOST_SEGMENTS // len(workers)))
    rows = []
    for worker in workers:
        rows.append([sum(_batches(record, worker) for record in column.records) for column in columns])
    per_column = "in each round" if len(columns) == len(series.rounds) else "in neighbouring rounds together"
    trace = {
        "type": "heatmap",
        "x": [columns[0].left, *(column.right for column in columns)],
        "y": [_name(worker) for worker in workers],
        "z": rows,
        "zmin": 0,
        "customdata": [[column.label for column in columns]] * len(workers),
        "colorscale": [[0, "--heat-low"], [1, "--heat-high"]],
        "colorbar": {"thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}, %{customdata}: %{z} batches<extra></extra>",
        "xgap": 1 if len(columns) <= 60 else 0,
        "ygap": 1,
    }
    total = sum(map(sum, rows))
    summary = f"{per_column}; {total} batches of {counted(len(workers), 'worker')} altogether"
    if len(series.workers) > len(workers):
        summary += ", which are the first ones"
    layout = {"yaxis": {"type": "category", "autorange": "reversed"}, "hovermode": "closest"}
    height_px = 120 + 22 * max(3, len(workers))
    is_thinned = len(columns) < len(series.rounds)
    return ReportFigure("Batches of each worker", summary, [trace], layout, height_px, wide=True, thinned=is_thinned)


def _batches(record: Record, worker: str) -> int:
    return int((record.get("batches") or {}).get(worker, 0))


def shares_figure(series: Series) -> ReportFigure | None:
    """Draw the uses of the fleet's time by round; None if the records don't have them."""
    columns = [(column, column.shares()) for column in _columns(series.rounds, MOST_BINS)]
    columns = [(column, shares) for column, shares in columns if shares]
    if not columns:
        return None
    traces: list[Trace] = []
    for use, (label, colour) in USES.items():
        traces.append(
            {
                "type": "bar",
                "name": label,
                "x": [(column.left + column.right) / 2 for column, _ in columns],
                "width": [column.right - column.left for column, _ in columns],
                "y": [shares.get(use, 0.0) for _, shares in columns],
                "customdata": [column.label for column, _ in columns],
                "marker": {"color": colour},
                "hovertemplate": f"%{{customdata}}: %{{y:.2~%}} {label}<extra></extra>",
            }
        )
    layout = {
        "barmode": "stack",
        "xrange": [columns[0][0].left, columns[-1][0].right],
        "hovermode": "closest",
        "showlegend": True,
        "yaxis": {"tickformat": ".0%", "range": [0, 1]},
    }
    is_thinned = len(columns) < len(series.rounds)
    summary = "all time of the fleet, from the first machine on"
    return ReportFigure("Use of time", summary, traces, layout, 300, wide=True, thinned=is_thinned)


def shares_text(shares: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """Return label, colour and share of each use that has taken time."""
    return [(*USES[use], shares[use]) for use in USES if shares.get(use)]
