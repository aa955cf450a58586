"""Processes and the machine, as Linux tells of them under ``/proc``."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float | None:
    """Resident memory; None: there is no such process."""
    with suppress(OSError):
        fields = (_PROC / str(pid) / "statm").read_text().split()
        return int(fields[1]) * _PAGE_BYTES / 1e6
    return None


def born(pid: int) -> str | None:
    """Start time of a process, as text that only serves for comparing; None: there is none, or it has ended."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return fields[19]


def title(pid: int) -> str:
    """The Python file that a process runs, or its program; ``ray::Class`` of an actor; empty: there is no process."""
    with suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")
        words = command.decode(errors="replace").split()
        if not words:
            return ""
        program = next((word for word in words if word.endswith(".py")), words[0])
        return program.rpartition("/")[2]
    return ""


def cpu_s(pid: int, thread: int | None = None) -> float:
    """Seconds that a process has worked, or one of its threads; 0 if there is no such process."""
    fields = _stat(pid, thread)
    if fields is None:
        return 0.0
    ticks = int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def busiest_thread_s(pid: int) -> float:
    """Seconds that the thread of a process has worked which has worked most."""
    threads = [int(path.name) for path in (_PROC / str(pid) / "task").glob("[0-9]*")]
    return max((cpu_s(pid, thread) for thread in threads), default=0.0)


def descendants(root: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*"):
        pid = int(path.name)
        fields = _stat(pid)
        if fields is not None:
            parent = int(fields[1])
            children.setdefault(parent, []).append(pid)
    pids = list(children.get(root, []))
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def busy_s() -> float:
    """Seconds that all cores have worked since the machine was started."""
    first_line, _, _ = (_PROC / "stat").read_text().partition("\n")
    ticks = [int(number) for number in first_line.split()[1:9]]
    idle = ticks[3] + ticks[4]  # Idle, and waiting for a disk.
    return (sum(ticks) - idle) / _TICKS


def machine() -> dict[str, Any]:
    """Conditions that figures depend on."""
    cpu = platform.machine()
    for line in (_PROC / "cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    return {
        "cores": os.cpu_count(),
        "cpu": cpu,
        "memory_gb": round(memory_bytes / 1e9, 1),
        "python": platform.python_version(),
        "ray": version("ray"),
        "torch": version("torch"),
    }


def _stat(pid: int, thread: int | None = None) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the third one on: state, parent, …; before them is a name of any characters."""
    with suppress(OSError):
        folder = _PROC / str(pid)
        if thread is not None:
            folder = folder / "task" / str(thread)
        _, _, fields = (folder / "stat").read_text().rpartition(")")
        return fields.split()
    return None
