"""Causes of the deaths of actors, in the words of Ray's errors, and machines that have left the cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.errors import first_line

_PROCESS = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_ADDRESS = re.compile(r"^\s*ip: (\S+)", re.MULTILINE)
_EXIT_CODE = re.compile(r"exit code (\d+)")
_SILENT_END = "End of file"
"""Ray's words for a connection that ended with its process, of which Ray doesn't learn the signal."""
_NO_MEMORY = "running low on memory"
_NODE_DIED = "node has died"


def death_text(error: BaseException) -> str:
    """Write the death of an actor's process in one line, with its machine and its cause as far as Ray tells them."""
    text = str(error)
    process, address = _PROCESS.search(text), _ADDRESS.search(text)
    machine = f" on {address[1]}" if address else ""
    if _NODE_DIED in text:
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


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster: Ray's id of it, and the name by which people know it."""

    node: str
    name: str


@dataclass(slots=True)
class MachineWatch:
    """Notices machines that vanish from the cluster."""

    _alive: dict[str, Machine] = field(default_factory=dict)
    """Machines that were alive at the last look, by node id."""

    def vanished(self, nodes: Iterable[Mapping[str, Any]]) -> list[Machine]:
        """Return the machines that were alive at the last look and aren't any more.

        Args:
            nodes: nodes of the cluster, as `ray.nodes` has them.

        """
        alive = {node["NodeID"]: Machine(node["NodeID"], _name(node)) for node in nodes if node["Alive"]}
        gone = [machine for node, machine in self._alive.items() if node not in alive]
        self._alive = alive
        return gone


def _name(node: Mapping[str, Any]) -> str:
    """Host name and address of a node; one of them if they are the same."""
    host, address = str(node.get("NodeManagerHostname") or ""), str(node["NodeManagerAddress"])
    return address if host in ("", address) else f"{host} ({address})"
