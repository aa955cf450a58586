"""Process of a Ray that a job starts for itself: starts a node, says its address, and ends it with the driver.

    driver ──starts──► head ──starts──► GCS, raylet ──starts──► `ray_worker.py`, one for each worker of Ray
       │◄──address or error──┘                                     │
       └──forks──► fork server ◄──────────hands itself over────────┘

It runs beside the driver, which meanwhile loads libraries. The driver says by its standard input that the dashboard may
start; the end of that input is the driver's, whatever the reason. The script needs only Ray, and imports nothing of
this package, which would cost time.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

SUBREAPER = 36
"""Option of prctl(2): orphans among all descendants become children of this process."""
LATER = "later"
"""Line by which the driver lets the processes start that training doesn't need."""
POLL_S = 1.0
"""Seconds between two checks of the processes of the node."""
GONE_S = 5.0
"""Longest wait for killed processes, in seconds."""


def main() -> None:
    """Start the node, and write its address or the error as a line of JSON to the original standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    # Workers that raylets start for no driver yet would be forked for another one than this.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)
    nodes: list[Any] = []
    threading.Thread(target=_follow_driver, args=(nodes,), name="driver", daemon=True).start()
    try:
        nodes.append(_start_patiently())
    except BaseException as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}), file=answers, flush=True)
    if nodes:
        print(json.dumps({"address": nodes[0].gcs_address}), file=answers, flush=True)
        raylet = nodes[0].all_processes["raylet"][0].process
        while raylet.poll() is None:
            time.sleep(POLL_S)
    _end([])  # Workers take this process for the raylet.


def _start_patiently() -> Any:
    """Start a node, a second time if the machine was too busy.

    A raylet ends if its agents haven't loaded their modules within 15 s (Ray 2.60.0), and the node times out. At the
    second time the modules are in memory.
    """
    try:
        return _start()
    except Exception as error:
        if "timed out" not in str(error):
            raise
    _kill_descendants()
    return _start()


def _start() -> Any:
    """Start a node as ``ray.init`` does, but leave the processes that training doesn't need for later."""
    import ray  # noqa: F401 - it has to be imported first
    from ray._private.authentication.authentication_token_setup import (
        enable_token_auth_by_default,
        ensure_token_if_auth_enabled,
    )
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class _Node(Node):  # type: ignore[misc]
        """A node without dashboard, log monitor and autoscaler's monitor, until `start_rest`."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._late_starts: list[Any] = []
            super().__init__(*arguments, **options)

        def start_monitor(self) -> None:
            self._late_starts.append(super().start_monitor)

        def start_log_monitor(self) -> None:
            self._late_starts.append(super().start_log_monitor)

        def start_api_server(self, **options: Any) -> None:
            start = super().start_api_server
            self._late_starts.append(lambda: start(**options))

        def start_rest(self) -> None:
            late_starts = self._late_starts
            self._late_starts = []
            for start in late_starts:
                start()

    enable_token_auth_by_default()
    ensure_token_if_auth_enabled({}, create_token_if_missing=True)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # ray.init does the same for a Ray that it starts.
    worker = str(Path(__file__).with_name("ray_worker.py"))
    parameters = RayParams(include_dashboard=False, worker_path=worker, _system_config={})
    return _Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)


def _follow_driver(nodes: list[Any]) -> None:
    """Follow the driver's orders, and end when it does."""
    for line in sys.stdin:
        if line.strip() == LATER and nodes:
            with suppress(Exception):  # The run needs none of them.
                nodes[0].start_rest()
    _end(nodes)


def _end(nodes: list[Any]) -> NoReturn:
    """End all processes; the raylet ends by itself, so that it removes its spilled objects from the disk."""
    with suppress(Exception):
        for node in nodes:
            node.destroy_external_storage()
            node._kill_process_type("raylet", allow_graceful=True, check_alive=False)
    _kill_descendants()
    os._exit(0)


def _kill_descendants() -> None:
    """Kill all processes below this one, and wait for their end."""
    deadline = time.monotonic() + GONE_S
    descendants = _descendants(os.getpid())
    while descendants and time.monotonic() < deadline:
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
        descendants = _descendants(os.getpid())


def _descendants(pid: int) -> list[int]:
    """All processes below one, zombies too."""
    descendants: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended.
            for child in map(int, children.read_text(encoding="ascii").split()):
                descendants += [child, *_descendants(child)]
    return descendants


if __name__ == "__main__":
    sys.path.pop(0)  # This folder: its modules could hide others.
    main()
