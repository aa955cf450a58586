"""Causes of the deaths of actors, in the words of Ray's errors, and machines that have left the cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypha_ray.errors import first_line

_PROCESS = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_ADDRESS = re.compile(r"(?:^\s*ip|\bNode IP): ([^\s,]+)", re.MULTILINE)
_EXIT_CODE = re.compile(r"exit code (\d+)")
_SILENT_END = "End of file"
"""Ray's words for a connection that ended with its process, of which Ray doesn't learn the signal."""
_NO_MEMORY = "running low on memory"
_NODE_DIED = re.compile("node has died|node it was running on is dead")
"""Ray's words about an actor, and about a task."""


def death_text(error: BaseException) -> str:
    """Write the death of an actor's process in one line, with its machine and its cause as far as Ray tells them."""
    text = str(error)
    process = _PROCESS.search(text)
    address = _ADDRESS.search(text)
    machine = f" on {address[1]}" if address else ""
    if _NODE_DIED.search(text):
        return f"its machine{f' {address[1]}' if address else ''} is gone"
    if process is None:
        return first_line(error)
    subject = f"its process {process[1]}{machine}"
    if _NO_MEMORY in text:
        return f"{subject} was ended by Ray, because the machine was running out of memory"
    if _SILENT_END in text:
        causes = "killed (SIGKILL, which the system sends for lack of memory too) or crashed"
        return f"{subject} ended without a word: {causes}"
    if code := _EXIT_CODE.search(text):
        return f"{subject} ended with exit code {code[1]}"
    return f"{first_line(error)} ({subject})"


MEMORY_S = 60.0
"""Time for which a lost worker counts to its machine: Ray finds a machine to be dead later than its processes."""


class LostNode(NamedTuple):
    """A machine that has left the cluster."""

    name: str
    """Host name and address, as people know the machine."""
    workers: list[int]
    """Numbers of the workers that were on it, in rising order."""


@dataclass(slots=True)
class NodeAttendance:
    """Notices machines that vanish from the cluster, and which workers go with them."""

    _names: dict[str, str] = field(default_factory=dict)
    """Names of the machines that were alive at the last look, by Ray's id of the node."""
    _seen: dict[str, dict[int, float]] = field(default_factory=dict)
    """Time at which each worker was last seen on each node."""

    def lost(
        self, nodes: Iterable[Mapping[str, Any]], workers: Mapping[str, Iterable[int]], now: float
    ) -> list[LostNode]:
        """Return the machines that were alive at the last look and aren't any more.

        Args:
            nodes: nodes of the cluster, as `ray.nodes` has them.
            workers: numbers of the workers on each node, by Ray's id of the node.
            now: time of this look, in seconds.

        """
        for node, numbers in workers.items():
            self._seen.setdefault(node, {}).update(dict.fromkeys(numbers, now))
        alive = {node["NodeID"]: _name(node) for node in nodes if node["Alive"]}
        gone = [
            LostNode(name, sorted(worker for worker, at in self._seen.pop(node, {}).items() if now - at <= MEMORY_S))
            for node, name in self._names.items()
            if node not in alive
        ]
        self._names = alive
        return gone


def _name(node: Mapping[str, Any]) -> str:
    """Host name and address of a node; one of them if they are the same."""
    host = str(node.get("NodeManagerHostname") or "")
    address = str(node["NodeManagerAddress"])
    return address if host in ("", address) else f"{host} ({address})"
