"""Traces of what happens to the machines of a group: JSON lines or CSV, with a time, a machine and an event.

    {"at_s": 120, "machine": 3, "event": "leave"}        at_s,machine,event
    {"at_s": 900, "machine": 3, "event": "join"}         120,3,leave

A machine whose first event is `join` isn't there before. Times are seconds since the beginning of the run, and needn't
be in order.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from hypha_ray.config.keys import shown
from hypha_ray.errors import ConfigError

EVENTS: Final = ("join", "leave", "kill", "hang", "preempt", "partition")
"""Events of a trace: `leave` is at once and for good until `join`, the others are those of `failures`."""
EXAMPLE: Final = '{"at_s": 0, "machine": 0, "event": "join"}'
FIELDS: Final = ("at_s", "machine", "event")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event of a trace."""

    at_s: float
    machine: int
    """Number of the machine within its group."""
    event: str


def read_trace(path: Path, count: int) -> list[TraceEvent]:
    """Read a trace for a group of so many machines, in order of time.

    Raises:
        ConfigError: CFG015, it can't be read; CFG012, it is empty; CFG001, CFG003, CFG005 or CFG012 with the line of a
            mistake.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        problem = f"the trace {path} can't be read"
        raise ConfigError("CFG015", problem, reason, fix="name a JSONL or CSV file beside the scenario") from None
    rows = _csv_rows(text, path) if path.suffix.lower() == ".csv" else _json_rows(text, path)
    events = [_event(fields, f"{path}:{line}", count) for line, fields in rows]
    if not events:
        raise ConfigError("CFG012", f"the trace {path} has no event", fix="give one, or leave available out")
    return sorted(events, key=lambda event: event.at_s)


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows below the line of names, with their lines; numbers are read as such."""
    reader = csv.reader(text.splitlines())
    names = [name.strip() for name in next(reader, [])]
    if names and not set(names) & set(FIELDS):
        problem = f"{path}:{reader.line_num} has no names of columns"
        raise ConfigError("CFG012", problem, shown(",".join(names)[:40]), ",".join(FIELDS), "begin with that line")
    if names:
        _check_names(names, f"{path}:{reader.line_num}")
    for values in reader:
        if not values:
            continue
        if len(values) != len(names):
            problem = f"{path}:{reader.line_num} has another number of fields than the first line"
            raise ConfigError("CFG003", problem, str(len(values)), str(len(names)), "mend it")
        yield reader.line_num, dict(zip(names, map(_number, values), strict=True))


def _number(text: Any) -> Any:
    """Number that a text is; otherwise the text without blanks around it."""
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            pass
    return text.strip() if isinstance(text, str) else text


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            problem = f"{path}:{number} is no JSON object"
            raise ConfigError(
                "CFG005", problem, shown(line[:40]), fix='write {"at_s": 0, "machine": 0, "event": "join"}'
            )
        yield number, fields


def _event(fields: dict[str, Any], location: str, count: int) -> TraceEvent:
    _check_names(fields, location)
    at_s = fields["at_s"]
    machine = fields["machine"]
    kind = fields["event"]
    if not isinstance(at_s, int | float) or isinstance(at_s, bool) or not 0 <= at_s < float("inf"):
        raise ConfigError("CFG003", f"{location}: at_s is out of range", shown(at_s), "seconds, 0 or more", "mend it")
    if not isinstance(machine, int) or isinstance(machine, bool) or not 0 <= machine < count:
        allowed = f"0 … {count - 1}, machines of the group"
        raise ConfigError("CFG003", f"{location}: machine is out of range", shown(machine), allowed, "mend it")
    if kind not in EVENTS:
        matches = get_close_matches(str(kind), EVENTS, n=1)
        fix = f"did you mean {matches[0]}?" if matches else "mend it"
        raise ConfigError("CFG003", f"{location}: event is out of range", shown(kind), ", ".join(EVENTS), fix)
    return TraceEvent(float(at_s), machine, kind)


def _check_names(fields: Iterable[str], location: str) -> None:
    names = set(fields)
    for name in sorted(names.difference(FIELDS)):
        matches = get_close_matches(name, FIELDS, n=1)
        fix = f"did you mean {matches[0]}?" if matches else "leave it out"
        raise ConfigError("CFG001", f"{location}: unknown field {shown(name)}", allowed=", ".join(FIELDS), fix=fix)
    for name in FIELDS:
        if name not in names:
            raise ConfigError("CFG012", f"{location}: {name} is missing", allowed=", ".join(FIELDS), fix="give it")
