"""Processes of a Ray that tests start: most are handed over to the process that forks them, three daemons just wait.

Other interpreters start as usual.

Python runs this module by itself if its folder is in PYTHONPATH. See `tests.support.forked_workers`.
"""

import os
import sys

LIBRARIES_READ = (
    "CUDA",
    "HF_",
    "KMP_",
    "LD_",
    "MKL_",
    "NUMBA_",
    "OMP_",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "TOKENIZERS_",
    "TORCH_",
    "TRANSFORMERS_",
)
"""Beginnings of variables that libraries may read as they are loaded."""
READ_LATER = {"HF_TOKEN", "LD_PRELOAD"}
"""Such variables that no library reads. A dashboard's own allocator is left out."""
WORKER = "/ray/_private/workers/default_worker.py"
DAEMONS = ("/dashboard/dashboard.py", "/dashboard/agent.py", "/runtime_env/agent/main.py")
UNUSED = ("/ray/_private/log_monitor.py", "/ray/autoscaler/_private/monitor.py", "ray.util.client.server")
"""Daemons that each Ray starts and that no test needs.

Nobody reads the logs they carry, no machines are hired, and no driver is outside of its cluster.
"""


def hand_over(forks: str, command: list[str], daemon: bool) -> None:
    """Ask for a fork with this process's environment and streams, and end; return if it wouldn't do.

    Who has started a daemon watches this process, so it ends with the fork, and the fork with it.
    """
    import json
    import signal
    import socket
    from pathlib import Path

    (prefix, network, tools, loaded), own = json.loads(Path(forks, "loaded").read_text()), dict(os.environ)
    read = [name for name in loaded.keys() | own if name.startswith(LIBRARIES_READ) and name not in READ_LATER]
    place = sys.prefix, str(Path("/proc/self/ns/net").readlink())
    compared = own | {"PYTHONPATH": own["PYTHONPATH"].removeprefix(tools + os.pathsep)}
    if (prefix, network) != place or any(loaded.get(name) != compared.get(name) for name in read):
        return
    start = {"command": command, "environment": own, "folder": str(Path.cwd()), "nice": os.nice(0), "daemon": daemon}
    start["blocked_signals"] = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
    start["oom_score_adj"] = Path("/proc/self/oom_score_adj").read_text()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect(f"{forks}/socket")
        socket.send_fds(asked, [json.dumps(start).encode()], [0, 1, 2])
        if daemon:
            asked.recv(1)  # Nothing comes but the end of the fork.
    os._exit(0)


if "TEST_FORKS" in os.environ:
    script = next((word for word in sys.orig_argv[1:] if word.endswith(".py")), "")
    if script.endswith((WORKER, *DAEMONS)):
        hand_over(os.environ["TEST_FORKS"], sys.orig_argv[sys.orig_argv.index(script) :], script.endswith(DAEMONS))
    if any(word.endswith(UNUSED) for word in sys.orig_argv):
        import signal

        while True:
            signal.pause()
