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
    """When a process was started, as text that only serves for comparing; None: there is none, or it has ended."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else fields[19]


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
    """What figures depend on."""
    cpu = [line for line in (_PROC / "cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cores": os.cpu_count(),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES / 1e9, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("ray", "torch")},
    }


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the third one on: state, parent, …; before them is a name of any characters."""
    with suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None
