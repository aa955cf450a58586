"""Start of a worker of Ray in a job's own Ray: handed over to the job's fork server, which has loaded the libraries.

If the server doesn't take it over, the worker starts as Ray has it. This script has to be quick, so it imports nothing
that it doesn't need.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SOCKET = "_HYPHA_RAY_FORK_SERVER"
"""Variable with the path of the fork server's socket."""
WAIT_S = 45.0
"""Longest wait for the fork server, which may still load libraries. After 60 s Ray gives a starting worker up."""
TAKEN = b"+"
"""Answer of a fork server that takes a worker over."""
MOST_BYTES = 1 << 18
"""Longest message to the fork server."""


def hand_over(arguments: list[str]) -> bool:
    """Hand command line, environment and streams over; return whether the fork server has taken them."""
    import json
    import signal
    import socket

    start = {
        "command": arguments,
        "environment": dict(os.environ),
        "prefix": sys.prefix,
        "folder": str(Path.cwd()),
        "nice": os.nice(0),
        "blocked_signals": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    start["oom_score_adj"] = Path("/proc/self/oom_score_adj").read_text(encoding="ascii")
    message = json.dumps(start).encode()
    if len(message) > MOST_BYTES:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(WAIT_S)
        server.connect(os.environ[SOCKET])
        socket.send_fds(server, [message], [0, 1, 2])
        return server.recv(1) == TAKEN


def main() -> None:
    """End, once the fork server has taken this worker over; otherwise run Ray's own script."""
    from importlib.util import find_spec

    package = find_spec("ray")
    assert package is not None and package.origin is not None
    script = Path(package.origin).parent / "_private" / "workers" / "default_worker.py"
    try:
        is_taken = hand_over([str(script), *sys.argv[1:]])
    except (OSError, KeyError):
        is_taken = False
    if is_taken:
        os._exit(0)
    options = sys.orig_argv[1 : -len(sys.argv)]
    os.execv(sys.executable, [sys.executable, *options, str(script), *sys.argv[1:]])


if __name__ == "__main__":
    main()
