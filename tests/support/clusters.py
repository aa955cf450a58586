"""Ray clusters of several nodes on this machine."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    ray.init(
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
        ray.init(address=cluster.address, namespace=namespace, log_to_driver=False)
        yield cluster
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
