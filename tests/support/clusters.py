"""Ray clusters of several nodes on this machine."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from chaoslab.arena import make_place_of_note
from ray.cluster_utils import Cluster

SHARED: dict[str, Any] = {"object_store_memory": 100_000_000}
"""Arguments of every node."""


@contextmanager
def single_node(**more: Any) -> Iterator[None]:
    """Ray with four logical CPUs, so that small jobs fit beside each other whatever the machine has.

    Args:
        more: further arguments of `ray.init`.

    """
    context = ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=300_000_000,
        include_dashboard=False,
        log_to_driver=False,
        namespace="tests",
        **more,
    )
    yield
    ray.shutdown()
    no_crash_in(Path(context.address_info["session_dir"]))


def no_crash_in(session: Path) -> None:
    """Raise `AssertionError` if one of Ray's processes crashed in this package; recovery hides that otherwise.

    Args:
        session: Ray's folder of the cluster.

    """
    crashes = []
    for log in (session / "logs").glob("worker-*.err"):
        text = log.read_text(encoding="utf-8", errors="replace")
        if (at := text.find("Fatal Python error: ")) >= 0 and "/hypha_ray/" in text[at:]:
            crashes.append(text[at : at + 2000])
    assert not crashes, "\n".join(crashes)


@contextmanager
def cluster_of(
    nodes: Sequence[dict[str, Any]], namespace: str = "tests", shared: dict[str, Any] | None = None, **head: Any
) -> Iterator[Cluster]:
    """A head without CPUs, which this process is connected to, and further nodes; gone with all files at the end.

    Args:
        nodes: arguments of each node beside the head.
        namespace: of this process.
        shared: arguments of every node; None: `SHARED`.
        head: further arguments of the head.

    """
    folder, shared = tempfile.mkdtemp(prefix="ray"), SHARED if shared is None else shared
    arguments = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder, **shared, **head}
    make_place_of_note()
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        for node in nodes:
            cluster.add_node(wait=False, **shared, **node)
        cluster.wait_for_nodes()
        context = ray.init(address=cluster.address, namespace=namespace, log_to_driver=False)
        yield cluster
        no_crash_in(Path(context.address_info["session_dir"]))
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def until(condition: Callable[[], bool], wait_s: float = 30.0) -> None:
    """Wait for a state of the cluster; its own tables follow what happens by seconds."""
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
