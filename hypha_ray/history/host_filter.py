"""Removal of users, machines and addresses from texts of a run, for a page that leaves the house."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.texts import HIDDEN

_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)"
    r"|(?<![\w:])(?=[0-9a-f:]*(?:::|[0-9a-f]{3}))(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])",
    re.IGNORECASE,
)
"""Addresses of IPv4 and IPv6."""
_HOME = re.compile(r"(?<=/home/)[^/\s'\"]+|(?<=/Users/)[^/\s'\"]+")
"""Name of a user in the path of a home folder."""
_MACHINE = re.compile(r"[^\s()]+")


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
    """Names and addresses of the machines that events tell of."""
    for event in events:
        if event.get("kind") == "lease":
            yield str(event.get("node") or "")
        elif event.get("kind") == "machine_loss":
            yield from _MACHINE.findall(str(event.get("machine") or ""))
