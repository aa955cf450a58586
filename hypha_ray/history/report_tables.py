"""Tables of a run's page: figures, the use of its time, settings that differ from defaults, provenance, and two lists.

The lists, which may be long, are those of events by kind, and of responses with their rewards. A page that leaves the
house has no users, machines and addresses in its texts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.keys import shown
from hypha_ray.config.load import resolved, settings_that_differ
from hypha_ray.history.comparison import shown_figures
from hypha_ray.history.report_charts import spread
from hypha_ray.history.report_timeline import USES, Hide
from hypha_ray.telemetry.news import KINDS, line_about
from hypha_ray.telemetry.sinks.files import ROLLOUTS, Record, read_jsonl, read_tail
from hypha_ray.telemetry.sinks.table import ABSENT, si
from hypha_ray.texts import HIDDEN, counted

EVENTS_OF_A_KIND = 120
MOST_EVENTS = 1000
"""Most events of one kind, and of all kinds together."""
LONGEST_EVENT = 300
"""Most characters of an event's text."""
ROUTINE = frozenset({"plan", "commit", "correction", "hire", "lease", "arrival", "stale"})
"""Kinds of events that every round has, which are hidden at first."""
_EVENT_TITLES = ("time, UTC", "kind", "round", "worker", "what happened")
_STAMPS = frozenset({"kind", "wall_time", "monotonic_s", "worker", "round", "incarnation"})
"""Fields of events with columns of their own, or that say nothing to people."""

_EMPTY: tuple[object, ...] = (None, "", {}, [])
"""Values that aren't shown."""
MOST_ROLLOUTS = 40
ROLLOUTS_OF_A_ROUND = 4
LONGEST_TEXT = 800
"""Most characters of a prompt or response."""
WHOLE_BYTES = 4 << 20
"""Size of a file of responses that is read as a whole; of a larger one the ends are, of half this size each."""
_OF_A_RESPONSE = frozenset({"kind", "wall_time", "monotonic_s", "round", "prompt", "response"})
"""Fields of responses that are shown in places of their own."""
_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)"
    r"|(?<![\w:])(?=[0-9a-f:]*(?:::|[0-9a-f]{3}))(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])",
    re.IGNORECASE,
)
"""Addresses of IPv4 and IPv6."""
_HOME = re.compile(r"(?<=/home/)[^/\s'\"]+|(?<=/Users/)[^/\s'\"]+")
"""Name of a user in the path of a home folder."""
_MACHINE = re.compile(r"[^\s()]+")


def tiles(figures: Record) -> Iterator[str]:
    """Lines of HTML with the figures that a run has; the exact value is in the attribute ``data-value``."""
    yield '<dl class="tiles">'
    for name, (field, format) in shown_figures([figures]).items():
        value = figures.get(field)
        if value is not None and format(value) != ABSENT:
            exact_text = escape(repr(value), quote=True)
            text = escape(format(value))
            yield f'<div><dt>{escape(name)}</dt><dd data-value="{exact_text}" title="{exact_text}">{text}</dd></div>'
    yield "</dl>"


def shares_bar(shares: Mapping[str, float]) -> Iterator[str]:
    """Lines of HTML with the uses of the time of the whole run, as one bar with its key."""
    parts = ""
    items = ""
    for use, style in USES.items():
        share = shares.get(use)
        if share:
            parts += f'<span style="flex:{share:.6f};background:var({style.colour})"></span>'
            items += f'<li style="--of:var({style.colour})">{style.label} {share:.1%}</li>'
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
    starts_text = counted(len(earlier_starts) + 1, "start")
    yield "last start", f"{start.get('wall_time')}, of {starts_text}"
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
        machine_kind = _machine(host)
        kinds[machine_kind] += 1
        if with_hosts:
            name = host.get("host")
            address = host.get("address")
            yield "machine", f"{name} ({address}): {machine_kind}"
    for machine_kind, count in kinds.items():
        if not with_hosts:
            yield counted(count, "machine"), machine_kind


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
        texts.append(f"{counted(count, 'sample')} for {split}")
    samples_text = ", ".join(texts)
    name = dataset.get("name")
    yield "dataset", hide(f"{name}: {samples_text}")
    if dataset.get("sha256"):
        yield "hash of the samples", str(dataset["sha256"])
    made_by = dataset.get("made_by")
    if made_by:
        source = made_by.get("source")
        date = made_by.get("date")
        yield "made from", hide(f"{source}, {date}")


def event_list(events: Sequence[Record], hide: Hide) -> Iterator[str]:
    """Lines of HTML with the events of a run, and boxes that choose their kinds; none without events."""
    kinds = Counter(str(event.get("kind")) for event in events)
    shown_events = _shown_events(events, kinds)
    if not shown_events:
        return
    yield '<fieldset class="kinds"><legend>Kinds of events</legend>'
    for kind, count in sorted(kinds.items()):
        checked = "" if kind in ROUTINE else " checked"
        name = escape(kind)
        yield f'<label><input type="checkbox" value="{name}"{checked}> {name} <small>{count}</small></label>'
    yield "</fieldset>"
    if len(shown_events) < len(events):
        count_text = counted(len(events), "event")
        yield f'<p class="note">{len(shown_events)} of {count_text}: the first and the last of each kind.</p>'
    yield '<div class="scroll tall" tabindex="0" role="region" aria-label="events"><table class="events">'
    titles = "".join(
        f'<th scope="col">{title}</th>' for title in ("time, UTC", "kind", "round", "worker", "what happened")
    )
    yield f"<thead><tr>{titles}</tr></thead>\n<tbody>"
    for event in shown_events:
        yield _event_row(event, hide)
    yield "</tbody></table></div>"


def _shown_events(events: Sequence[Record], kinds: Mapping[str, int]) -> list[Record]:
    """Events of a page, in order: of each kind the first and the last ones."""
    of_a_kind = min(EVENTS_OF_A_KIND, MOST_EVENTS // max(1, len(kinds)))
    seen: Counter[str] = Counter()
    shown_events = []
    for event in events:
        kind = str(event.get("kind"))
        seen[kind] += 1
        is_last = seen[kind] > kinds[kind] - of_a_kind * 2 // 3
        if seen[kind] <= of_a_kind // 3 or is_last:
            shown_events.append(event)
    return shown_events


def _event_row(event: Record, hide: Hide) -> str:
    kind = str(event.get("kind"))
    wall_time = str(event.get("wall_time", ""))
    time = wall_time[:19].replace("T", " ")
    round_number = event.get("round")
    round_text = ""
    if isinstance(round_number, int):
        round_text = str(round_number + 1)
    worker = str(event.get("worker", ""))
    text = _cut(hide(_event_text(event)), LONGEST_EVENT)
    cells = _cells("td", (time, kind, round_text, worker, text))
    return f'<tr data-kind="{escape(kind)}">{cells}</tr>'


def _cells(tag: str, texts: Iterable[str]) -> str:
    """Cells of a row of plain texts."""
    cells = ""
    for text in texts:
        cells += f"<{tag}>{escape(text)}</{tag}>"
    return cells


def _event_text(event: Record) -> str:
    """Text about an event: the console's line if there is one for its kind, otherwise its fields."""
    kind = str(event.get("kind"))
    if kind == "problem" and "text" in event:
        return str(event["text"])
    if kind in KINDS:
        try:
            return line_about(kind, [event])
        except (KeyError, TypeError):
            pass  # The event isn't one of ours.
    parts = []
    for name, value in event.items():
        if name == "next_round" and isinstance(value, int):
            parts.append(f"next round {value + 1}")
        elif name not in _STAMPS and value not in _EMPTY:
            parts.append(f"{name} {_plain_text(value)}")
    return ", ".join(parts)


def rollout_list(folder: Path) -> Iterator[str]:
    """Lines of HTML with responses of a run and their rewards; none without responses."""
    rollouts_by_round = _rollouts_by_round(folder / ROLLOUTS)
    if not rollouts_by_round:
        return
    shown_by_round: dict[int, list[Record]] = {}
    for round_number in spread(sorted(rollouts_by_round), MOST_ROLLOUTS // ROLLOUTS_OF_A_ROUND):
        shown_by_round[round_number] = _of_round(rollouts_by_round[round_number])
    shown_count = sum(map(len, shown_by_round.values()))
    total = sum(map(len, rollouts_by_round.values()))
    text = f"{shown_count} of {counted(total, 'response')}"
    if (folder / ROLLOUTS).stat().st_size > WHOLE_BYTES:
        text = f"{shown_count} responses, of the first and the last rounds"
    yield f'<p class="note">{text}.</p>'
    last_round = max(shown_by_round)
    for round_number, rollouts in shown_by_round.items():
        is_open = " open" if round_number == last_round else ""
        yield f"<details{is_open}><summary>Round {round_number + 1}</summary>"
        yield from map(_rollout, rollouts)
        yield "</details>"


def _rollouts_by_round(path: Path) -> dict[int, list[Record]]:
    """Responses of a file by round; of a large file those at its ends."""
    if not path.exists():
        return {}
    rollouts: list[dict[str, Any]]
    if path.stat().st_size <= WHOLE_BYTES:
        rollouts = read_jsonl(path)
    else:
        rollouts = read_jsonl(path, end=WHOLE_BYTES // 2)
        rollouts += read_tail(path, WHOLE_BYTES // 2)
    by_round: dict[int, list[Record]] = {}
    for rollout in rollouts:
        if isinstance(rollout.get("round"), int):
            by_round.setdefault(rollout["round"], []).append(rollout)
    return by_round


def _of_round(rollouts: Sequence[Record]) -> list[Record]:
    """Some responses of a round, from the lowest reward to the highest one."""
    return spread(sorted(rollouts, key=_reward), ROLLOUTS_OF_A_ROUND)


def _reward(rollout: Record) -> float:
    """Reward of a response; the lowest of all if it has none."""
    reward = rollout.get("reward")
    if isinstance(reward, int | float):
        return float(reward)
    return float("-inf")


def _rollout(rollout: Record) -> str:
    chips = ""
    facts = {"reward": rollout.get("reward"), "worker": rollout.get("worker"), **rollout}
    for name, value in facts.items():
        if value not in _EMPTY and name not in _OF_A_RESPONSE:
            text = _cut(_plain_text(value), LONGEST_EVENT)
            chips += f"<span>{escape(name)} {escape(text)}</span>"
    texts = _text_of("prompt", rollout) + _text_of("response", rollout)
    return f'<article class="rollout"><p class="chips">{chips}</p>{texts}</article>'


def _text_of(field: str, rollout: Record) -> str:
    """A text of a response as HTML."""
    text = _cut(_plain_text(rollout.get(field, "")), LONGEST_TEXT)
    return f'<pre class="{field}">{escape(text)}</pre>'


def _plain_text(value: Any) -> str:
    """A value of a record as text: numbers with six digits, tables as names and values, lists as JSON."""
    match value:
        case str():
            return value
        case float():
            return f"{value:.6g}"
        case Mapping():
            texts = []
            for name, item in value.items():
                texts.append(f"{name} {_plain_text(item)}")
            return ", ".join(texts)
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str, most_characters: int) -> str:
    """A text, or its beginning with the number of characters that are left out."""
    if len(text) <= most_characters:
        return text
    return f"{text[:most_characters]} … {len(text) - most_characters} more characters"


class HostFilter:
    """Replaces what tells a user or a machine by ``***``.

    Args:
        provenance: account of the run's starts.
        events: events of the run.
        is_on: whether anything is replaced.

    """

    def __init__(self, provenance: Record, events: Iterable[Record], is_on: bool = True) -> None:
        self.is_on = is_on
        names = {name for name in (*_names(provenance), *_nodes(events)) if name}
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        self._names = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in longest_first) or r"(?!)")

    def __call__(self, text: object) -> str:
        """Return a text without users, machines and addresses."""
        if not self.is_on:
            return str(text)
        without_homes = _HOME.sub(HIDDEN, str(text))
        without_names = self._names.sub(HIDDEN, without_homes)
        return _ADDRESS.sub(HIDDEN, without_names)


def _names(provenance: Record) -> Iterator[str]:
    """Users, names and addresses of machines of all starts; of a full name its first part, too."""
    for start in (provenance, *(provenance.get("earlier") or ())):
        hosts: list[Any] = [start]
        hosts += start.get("hosts") or ()
        for host in hosts:
            for field in ("user", "host", "address"):
                name = str(host.get(field) or "")
                yield name
                if field == "host":
                    yield name.partition(".")[0]


def _nodes(events: Iterable[Record]) -> Iterator[str]:
    """Names and addresses of the machines in events."""
    for event in events:
        if event.get("kind") == "lease":
            yield str(event.get("node") or "")
        elif event.get("kind") == "machine_loss":
            yield from _MACHINE.findall(str(event.get("machine") or ""))
