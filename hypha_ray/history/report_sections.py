"""Sections of a run's page: figures, curves, workers, plan, traffic, cost, settings and provenance, as HTML."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.compare import settings_that_differ
from hypha_ray.config.keys import shown
from hypha_ray.config.load import resolved
from hypha_ray.history.account import RunFiles
from hypha_ray.history.comparison import FIGURES
from hypha_ray.history.report_charts import Line, ReportFigure, line_figure, lines_of
from hypha_ray.history.report_timeline import Hide, shares_text
from hypha_ray.telemetry.charts import TRAFFIC
from hypha_ray.telemetry.series import Series, every_step_bytes, gradient_norms, running_totals
from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.telemetry.sinks.table import ABSENT, si
from hypha_ray.texts import counted

MOST_CURVES = 8
"""Most workers with a curve of their own in a chart."""
_NOT_CURVES = {
    *("round", "rounds", "epoch", "time_s", "elapsed_s", "eta_s", "fleet_s", "cost"),
    *("samples", "tokens", "scored", "possible_samples", "arrivals"),
}
"""Numbers of a round's record that say nothing as a curve, or are shown elsewhere."""


def tiles(figures: Record) -> Iterator[str]:
    """Lines of HTML with the figures that a run has; the exact value is in the attribute ``data-value``."""
    yield '<dl class="tiles">'
    for name, (field, format) in FIGURES.items():
        value = figures.get(field)
        text = ABSENT if value is None else format(value)
        if text != ABSENT:
            exact = escape(repr(value), quote=True)
            yield f'<div><dt>{escape(name)}</dt><dd data-value="{exact}" title="{exact}">{escape(text)}</dd></div>'
    yield "</dl>"


def objective_lines(series: Series) -> list[Line]:
    """Return the curves of training and of evaluations by the run's objective."""
    lines = []
    trained = series.objective.trained
    if series.has(trained):
        lines.append(Line(f"{trained}, training", series.numbers, series.column(trained)))
    if series.evaluations:
        name = series.objective.name
        numbers = [record["round"] + 1 for record in series.evaluations]
        values = [float(record[name]) for record in series.evaluations]
        lines.append(Line(f"{series.objective.validated}, validation", numbers, values))
    return lines


def task_lines(series: Series) -> list[Line]:
    """Return the curves of accuracy, metrics of the job, and shares of solved prompts."""
    curves: dict[str, dict[int, float]] = {}
    for number, figures in series.tasks.items():
        for name, value in figures.items():
            curves.setdefault(name, {})[number + 1] = value
    return [Line(name, list(curve), list(curve.values())) for name, curve in curves.items()]


def gradient_lines(steps: Sequence[Record]) -> list[Line]:
    """Return the curves of the gradients' norms of the first workers."""
    norms = gradient_norms(steps)
    workers = sorted(norms, key=lambda name: (len(name), name))[:MOST_CURVES]
    suffix = "" if len(workers) == len(norms) else f" of {len(norms)}"
    return [Line(f"worker {worker}{suffix}", *norms[worker]) for worker in workers]


def further_fields(series: Series, charted: Iterable[str]) -> list[str]:
    """Names of numbers that rounds have and no chart of ours shows, such as the rewards of each function."""
    known = {*charted, *_NOT_CURVES, series.objective.trained}
    names: dict[str, None] = {}
    for record in series.rounds:
        for name, value in record.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name not in known and not name.endswith("_total") and not name.startswith("bytes"):
                names[name] = None
    return list(names)


def traffic_figures(series: Series, most_points: int) -> Iterator[ReportFigure]:
    """Draw the bytes of each direction: in each round, and so far."""
    each, encoding = TRAFFIC
    lines = lines_of(series, each)
    totals = []
    for line in lines:
        totals.append(Line(line.label, line.rounds, running_totals(line.values)))
    unsent = every_step_bytes(series)
    if totals and unsent:
        label = "up, if gradients were exchanged at every step"
        totals.append(Line(label, series.numbers, unsent, dashed=True))
    for figure in (
        line_figure(each.title, each.unit, lines, most_points),
        line_figure("Bytes so far", "B", totals, most_points),
        line_figure(encoding.title, encoding.unit, lines_of(series, encoding), most_points),
    ):
        if figure is not None:
            if figure.title == "Bytes so far" and unsent:
                figure.layout["yaxis"]["type"] = "log"
            yield figure


def node_rows(series: Series, with_hosts: bool) -> list[tuple[str, str]]:
    """Return the bytes that were read from each data node; without hosts, nodes have numbers for names."""
    total: Counter[str] = Counter()
    for record in series.rounds:
        total.update(record.get("bytes_from") or {})
    rows = []
    for number, (node, size_bytes) in enumerate(total.most_common(), start=1):
        rows.append((node if with_hosts else f"data node {number}", f"{si(size_bytes)}B"))
    return rows


def cost_lines(series: Series) -> list[Line]:
    """Return the curves of the cost in each round, and so far."""
    if not series.has("cost"):
        return []
    costs = series.column("cost")
    each = Line("since the record before", series.numbers, costs)
    return [each, Line("so far", series.numbers, running_totals(costs))]


def shares_bar(shares: Mapping[str, float]) -> Iterator[str]:
    """Lines of HTML with the uses of the time of the whole run, as one bar with its key."""
    uses = shares_text(shares)
    parts = [f'<span style="flex:{share:.6f};background:var({colour})"></span>' for _, colour, share in uses]
    yield f'<div class="shares" aria-hidden="true">{"".join(parts)}</div>'
    items = [f'<li style="--of:var({colour})">{escape(label)} {share:.1%}</li>' for label, colour, share in uses]
    yield f'<ul class="key">{"".join(items)}</ul>'


def setting_rows(tables: Mapping[str, Any], hide: Hide) -> list[tuple[str, str, str]]:
    """Return the keys of a job file that differ from their defaults, with value and default."""
    rows = []
    for key, (value, default) in settings_that_differ([tables, resolved(Job())]).items():
        rows.append((hide(key), hide(_setting(value)), _setting(default)))
    return rows


def _setting(value: Any) -> str:
    return ABSENT if value is None else shown(value)


def provenance_rows(run: RunFiles, hide: Hide, with_hosts: bool) -> Iterator[tuple[str, str]]:
    """Yield subjects and texts about how a run was made; users and machines only if they are asked for."""
    start = run.provenance
    if not start:
        return
    starts = len(start.get("earlier") or ()) + 1
    yield "last start", f"{start.get('wall_time', '?')}, of {counted(starts, 'start')}"
    if start.get("command"):
        yield "command", hide(shlex.join(map(str, start["command"])))
    if with_hosts:
        for name in ("user", "host", "folder"):
            if start.get(name):
                yield name, str(start[name])
    commit = start.get("commit")
    if commit:
        changes = ", with uncommitted changes" if start.get("uncommitted_changes") else ""
        yield "hypha_ray's commit", f"{commit}{changes}"
    versions = start.get("versions") or {}
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield from _machine_rows(start.get("hosts") or (), with_hosts)
    yield from _worker_rows(start)
    yield from _dataset_rows(start.get("dataset") or {}, hide)


def _machine_rows(hosts: Sequence[Mapping[str, Any]], with_hosts: bool) -> Iterator[tuple[str, str]]:
    kinds: Counter[str] = Counter()
    for host in hosts:
        text = f"{host.get('cpus') or 0:g} CPUs"
        if host.get("gpus"):
            text += f", {host['gpus']:g} × {host.get('gpu_type') or 'GPU'}"
        if host.get("memory_bytes"):
            text += f", {si(host['memory_bytes'])}B of memory"
        kinds[text] += 1
        if with_hosts:
            yield "machine", f"{host.get('host')} ({host.get('address')}): {text}"
    if kinds and not with_hosts:
        yield "machines", "; ".join(f"{count} with {text}" for text, count in kinds.items())


def _worker_rows(start: Record) -> Iterator[tuple[str, str]]:
    """Devices and chosen settings, each with the number of its workers."""
    devices = Counter(map(str, (start.get("devices") or {}).values()))
    if devices:
        yield "devices", ", ".join(f"{counted(count, 'worker')} on {device}" for device, count in devices.items())
    settings: Counter[str] = Counter()
    for chosen in (start.get("settings") or {}).values():
        settings[", ".join(f"{name} {shown(value)}" for name, value in chosen.items())] += 1
    for text, count in settings.items():
        yield f"settings of {counted(count, 'worker')}", text


def _dataset_rows(dataset: Record, hide: Hide) -> Iterator[tuple[str, str]]:
    if dataset.get("name"):
        samples = ", ".join(f"{count} {split}" for split, count in (dataset.get("samples") or {}).items())
        yield "dataset", hide(f"{dataset['name']}: {samples}")
    if dataset.get("sha256"):
        yield "hash of the samples", str(dataset["sha256"])
    made_by = dataset.get("made_by") or {}
    if made_by:
        yield "made from", hide(f"{made_by.get('source', '?')}, {made_by.get('date', '?')}")
