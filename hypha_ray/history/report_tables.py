"""Tables of a run's page: its figures, the use of its time, settings that differ from defaults, and provenance."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.compare import settings_that_differ
from hypha_ray.config.keys import shown
from hypha_ray.config.load import resolved
from hypha_ray.history.comparison import shown_figures
from hypha_ray.history.report_timeline import USES, Hide
from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.telemetry.sinks.table import ABSENT, si
from hypha_ray.texts import counted


def tiles(figures: Record) -> Iterator[str]:
    """Lines of HTML with the figures that a run has; the exact value is in the attribute ``data-value``."""
    yield '<dl class="tiles">'
    for name, (field, format) in shown_figures([figures]).items():
        value = figures.get(field)
        if value is not None and format(value) != ABSENT:
            exact = escape(repr(value), quote=True)
            text = escape(format(value))
            yield f'<div><dt>{escape(name)}</dt><dd data-value="{exact}" title="{exact}">{text}</dd></div>'
    yield "</dl>"


def shares_bar(shares: Mapping[str, float]) -> Iterator[str]:
    """Lines of HTML with the uses of the time of the whole run, as one bar with its key."""
    parts = ""
    items = ""
    for use, look in USES.items():
        share = shares.get(use)
        if share:
            parts += f'<span style="flex:{share:.6f};background:var({look.colour})"></span>'
            items += f'<li style="--of:var({look.colour})">{look.label} {share:.1%}</li>'
    yield f'<div class="shares" aria-hidden="true">{parts}</div>'
    yield f'<ul class="key">{items}</ul>'


def setting_rows(tables: Mapping[str, Any], hide: Hide) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a job file that differ from their defaults, with value and default."""
    defaults = resolved(Job())
    for key, (value, default) in settings_that_differ([tables, defaults]).items():
        if value is None:
            continue  # The run is older than the key.
        default_text = ABSENT
        if default is not None:
            default_text = shown(default)
        value_text = hide(shown(value))
        yield hide(key), value_text, default_text


def provenance_rows(start: Record, hide: Hide, with_hosts: bool) -> Iterator[tuple[str, str]]:
    """Yield subjects and texts about how a run was made; users and machines only if they are asked for."""
    if not start:
        return
    earlier_starts = start.get("earlier") or ()
    starts = counted(len(earlier_starts) + 1, "start")
    yield "last start", f"{start.get('wall_time')}, of {starts}"
    command = start.get("command")
    if command:
        words = map(str, command)
        yield "command", hide(shlex.join(words))
    if with_hosts:
        for name in ("user", "host", "folder"):
            if start.get(name) is not None:
                yield name, str(start[name])
    commit = start.get("commit")
    if commit and start.get("uncommitted_changes"):
        yield "hypha_ray's commit", f"{commit}, with uncommitted changes"
    elif commit:
        yield "hypha_ray's commit", str(commit)
    yield "versions", _pairs(start.get("versions"))
    yield from _machine_rows(start.get("hosts"), with_hosts)
    yield from _worker_rows(start)
    yield from _dataset_rows(start.get("dataset"), hide)


def _pairs(table: Mapping[str, object] | None) -> str:
    """Names and values of a table as text."""
    texts = []
    for name, value in (table or {}).items():
        text = str(value)
        if isinstance(value, bool):
            text = text.lower()
        texts.append(f"{name} {text}")
    return ", ".join(texts)


def _machine_rows(hosts: Iterable[Record] | None, with_hosts: bool) -> Iterator[tuple[str, str]]:
    """Rows about machines: each with its name, or how many there are of each kind."""
    kinds: Counter[str] = Counter()
    for host in hosts or ():
        kind = _machine(host)
        kinds[kind] += 1
        if with_hosts:
            name = host.get("host")
            address = host.get("address")
            yield "machine", f"{name} ({address}): {kind}"
    for kind, count in kinds.items():
        if not with_hosts:
            yield counted(count, "machine"), kind


def _machine(host: Record) -> str:
    """Parts of a machine."""
    cpus = host.get("cpus") or 0
    text = f"{cpus:g} CPUs"
    gpus = host.get("gpus")
    if gpus:
        gpu_type = host.get("gpu_type") or "GPU"
        text += f", {gpus:g} × {gpu_type}"
    memory_bytes = host.get("memory_bytes")
    if memory_bytes:
        text += f", {si(memory_bytes)}B of memory"
    return text


def _worker_rows(start: Record) -> Iterator[tuple[str, str]]:
    """Rows with devices and chosen settings, each with the number of its workers."""
    devices = start.get("devices") or {}
    for device, count in Counter(devices.values()).items():
        yield "device", f"{device}, of {counted(count, 'worker')}"
    settings_by_worker = start.get("settings") or {}
    settings = Counter(map(_pairs, settings_by_worker.values()))
    for text, count in settings.items():
        yield f"settings of {counted(count, 'worker')}", text


def _dataset_rows(dataset: Record | None, hide: Hide) -> Iterator[tuple[str, str]]:
    if not dataset:
        return
    texts = []
    samples_by_split = dataset.get("samples") or {}
    for split, count in samples_by_split.items():
        texts.append(f"{count} samples for {split}")
    samples = ", ".join(texts)
    name = dataset.get("name")
    yield "dataset", hide(f"{name}: {samples}")
    if dataset.get("sha256"):
        yield "hash of the samples", str(dataset["sha256"])
    made_by = dataset.get("made_by")
    if made_by:
        source = made_by.get("source")
        date = made_by.get("date")
        yield "made from", hide(f"{source}, {date}")
