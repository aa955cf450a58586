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
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES / 1e6
    return None


def born(pid: int) -> str | None:
    """Start time of a process, as text that only serves for comparing; None: there is none, or it has ended."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else fields[19]


def title(pid: int) -> str:
    """The Python file that a process runs, or its program; ``ray::Class`` of an actor; empty: there is no process."""
    with suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        return next((word for word in words if word.endswith(".py")), *words[:1]).rpartition("/")[2] if words else ""
    return ""


def cpu_s(pid: int, thread: int | None = None) -> float:
    """Seconds that a process has worked, or one of its threads; 0 if there is no such process."""
    fields = _stat(pid, thread)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS


def busiest_thread_s(pid: int) -> float:
    """Seconds that the thread of a process has worked which has worked most."""
    return max((cpu_s(pid, int(path.name)) for path in (_PROC / str(pid) / "task").glob("[0-9]*")), default=0.0)


def descendants(root: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*"):
        fields = _stat(int(path.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(path.name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def busy_s() -> float:
    """Seconds that all cores have worked since the machine was started."""
    numbers = [int(number) for number in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(numbers) - numbers[3] - numbers[4]) / _TICKS  # all but idle and waiting for a disk


def machine() -> dict[str, Any]:
    """Conditions that figures depend on."""
    cpu = [line for line in (_PROC / "cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES / 1e9, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("ray", "torch")},
    }


def _stat(pid: int, thread: int | None = None) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the third one on: state, parent, …; before them is a name of any characters."""
    with suppress(OSError):
        folder = _PROC / str(pid) if thread is None else _PROC / str(pid) / "task" / str(thread)
        return (folder / "stat").read_text().rpartition(")")[2].split()
    return None
