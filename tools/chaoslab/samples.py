"""Load and memory, looked at every few seconds while a campaign goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaoslab.figures.growth import Life, settled, slope_per_hour
from chaoslab.processes import busy_s, memory_mb

EVERY_S = 2.0
_LATE_PART = 3
"""The last one of so many parts of a window is its end."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The machine at one time."""

    at_s: float
    busy_s: float
    store_bytes: int


@dataclass(slots=True)
class Samples:
    """Findings."""

    moments: list[Moment] = field(default_factory=list)
    memory: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)
    """By what it is and process id: seconds and megabytes."""
    load: list[float] = field(default_factory=list)
    """Load averages over one minute."""

    def take(self, now: float, pids: Mapping[str, int], store_bytes: int) -> None:
        """Add a sample; `pids` are the processes that should last as long as the run, by name."""
        self.moments.append(Moment(now, busy_s(), store_bytes))
        self.load.append(round(os.getloadavg()[0], 2))
        for name, pid in pids.items():
            size_mb = memory_mb(pid)
            if size_mb is not None:
                kind = name.partition(":")[0].partition("-")[0]
                self.memory.setdefault((kind, pid), []).append((now, size_mb))

    def busy_cores(self, begin_s: float, end_s: float) -> float | None:
        """Cores that worked in that time, on average; those of other programs too."""
        inside = [moment for moment in self.moments if begin_s <= moment.at_s <= end_s]
        if len(inside) < 2:
            return None
        first = inside[0]
        last = inside[-1]
        return round((last.busy_s - first.busy_s) / (last.at_s - first.at_s), 2)

    def store_mb(self, begin_s: float, end_s: float) -> dict[str, float | None]:
        """Mean size of what is in the object stores, in the whole time and in its last third."""
        late_s = end_s - (end_s - begin_s) / _LATE_PART
        return {"mean": self._store_mb(begin_s, end_s), "end": self._store_mb(late_s, end_s)}

    def growth(self) -> dict[str, dict[str, Any]]:
        """Megabytes per hour by least squares, by what a process is, and how many points in how many minutes say so."""
        lives: dict[str, list[Life]] = {}
        for (name, _), life in sorted(self.memory.items()):
            settled_life = settled(life)
            if settled_life:
                lives.setdefault(name, []).append(settled_life)
        return {name: _line(lives_of_kind) for name, lives_of_kind in lives.items()}

    def _store_mb(self, begin_s: float, end_s: float) -> float | None:
        sizes = [moment.store_bytes / 1e6 for moment in self.moments if begin_s <= moment.at_s <= end_s]
        return round(sum(sizes) / len(sizes), 2) if sizes else None


def _line(lives: list[Life]) -> dict[str, Any]:
    slope = slope_per_hour(lives)
    seconds = sum(life[-1][0] - life[0][0] for life in lives)
    points = sum(len(life) for life in lives)
    return {
        "mb_per_hour": None if slope is None else round(slope, 2),
        "points": points,
        "minutes": round(seconds / 60, 1),
    }
