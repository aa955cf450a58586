"""A Ray cluster on this machine of which parts can be killed: a head beside the run directory, and nodes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from chaoslab.processes import descendants
from ray._private.state import actors
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

from hypha_ray.driver.credentials import make_token

STORE_BYTES = 100_000_000
"""Object store of each node."""
REPLACEMENT_S = 3.0
"""Seconds after which a new node is started for one that was killed."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A living actor of the run."""

    name: str
    pid: int
    node: str


class Arena:
    """The cluster, while the context lasts. The head has no CPU, every other node one logical CPU: one worker each.

    Args:
        nodes: how many there are beside the head.

    """

    def __init__(self, nodes: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray")
        self._count = nodes
        self._nodes: dict[str, Any] = {}
        self._due_s: list[float] = []
        """Times at which nodes that replace others will be started."""

    def __enter__(self) -> Arena:
        make_token()
        os.environ.setdefault("RAY_TMPDIR", self._folder)  # A user's own note of the present cluster stays as it is.
        make_place_of_note()
        head = {"num_cpus": 0, "include_dashboard": False, **self._shared}
        with _our_sigterm():
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(self._count):
                self._add()
            self._cluster.wait_for_nodes()
            with _our_sigterm():
                ray.init(address=self.address, namespace="chaos", log_to_driver=False, logging_level="error")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    @property
    def address(self) -> str:
        """Value of RAY_ADDRESS."""
        return str(self._cluster.address)

    def actors(self) -> list[Actor]:
        """All living actors, by name; only the run has any here."""
        living = []
        for row in actors().values():
            if row["State"] == "ALIVE" and row["Pid"]:
                living.append(Actor(row["Name"], row["Pid"], row["Address"]["NodeID"]))
        return sorted(living, key=lambda actor: actor.name)

    def raylet(self, node: str) -> int | None:
        """Process id of a node's raylet; None for the head, which stays, and for nodes that are gone."""
        return self._pid(self._nodes[node], "raylet") if node in self._nodes else None

    def lasting(self) -> dict[str, int]:
        """Processes of Ray that live as long as their node."""
        raylets = {f"raylet:{name}": self._pid(node, "raylet") for name, node in self._nodes.items()}
        head = self._cluster.head_node
        return {"gcs": self._pid(head, "gcs_server"), "raylet:head": self._pid(head, "raylet"), **raylets}

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, and start another one a little later."""
        ray_node = self._nodes.pop(node)
        process = ray_node.all_processes["raylet"][0].process
        for pid in [process.pid, *descendants(process.pid)]:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        self._due_s.append(time.monotonic() + REPLACEMENT_S)

    def turn(self, now: float) -> None:
        """Start the nodes whose time has come. Ray does that in the main thread only, and takes a second or two."""
        if self._due_s and now >= self._due_s[0]:
            self._due_s.pop(0)
            self._add()

    def store_bytes(self) -> int:
        """Bytes in the object stores of all nodes."""
        return int(_stores(ray.cluster_resources()) - _stores(ray.available_resources()))

    def _add(self) -> None:
        with _our_sigterm():
            node = self._cluster.add_node(num_cpus=1, wait=False, **self._shared)
        self._nodes[node.node_id] = node

    @property
    def _shared(self) -> dict[str, Any]:
        return {"object_store_memory": STORE_BYTES, "temp_dir": self._folder}

    @staticmethod
    def _pid(node: Any, kind: str) -> int:
        return int(node.all_processes[kind][0].process.pid)

    def _close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def _stores(resources: dict[str, float]) -> float:
    return resources.get("object_store_memory", 0.0)


@contextmanager
def _our_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM for itself whenever it starts something; afterwards it is ours again."""
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, ours)


def make_place_of_note() -> None:
    """Make the folder in which Ray notes the present cluster's address, for a cluster whose files are elsewhere."""
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
