"""CPU time of a run's processes: its own actors, and Ray's daemons beside them."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass

from chaoslab.processes import busiest_thread_s, cpu_s, descendants, title

WORKER = "ray::TrainWorker"


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds up to a moment, of this process and all that it has started."""

    at_s: float
    """Monotonic seconds."""
    by_process: dict[tuple[str, int], float]
    """Seconds by title and process id."""
    loops: dict[int, float]
    """Seconds of the training thread, by the process id of its worker."""

    @classmethod
    def now(cls) -> Usage:
        """Look at all processes."""
        titles = {pid: title(pid) for pid in (os.getpid(), *descendants(os.getpid()))}
        loops = {pid: busiest_thread_s(pid) for pid, name in titles.items() if name.startswith(WORKER)}
        seconds = {(name or "?", pid): cpu_s(pid) for pid, name in titles.items()}
        return cls(time.monotonic(), seconds, loops)

    def loop_s(self, before: Usage) -> float:
        """CPU seconds of all training threads since an earlier moment."""
        return sum(seconds - before.loops.get(pid, 0.0) for pid, seconds in self.loops.items())

    def cores(self, before: Usage) -> Counter[str]:
        """Cores that processes have kept busy since an earlier moment, by title."""
        busy: Counter[str] = Counter()
        for key, seconds in self.by_process.items():
            busy[key[0]] += (seconds - before.by_process.get(key, 0.0)) / (self.at_s - before.at_s)  # type: ignore[assignment]
        return busy
