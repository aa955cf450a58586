"""Trackers' packages, and the curves that records of metrics are in them."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks.files import Record, plain


def check_installed(tracker: str, packages: Iterable[str]) -> None:
    """Refuse a tracker whose packages aren't installed.

    Raises:
        ConfigError: CFG022.

    """
    if not all(map(importlib.util.find_spec, packages)):
        what = f"telemetry.sinks has {tracker}, which isn't installed"
        raise ConfigError("CFG022", what, fix=f"pip install {tracker}, or leave it out of telemetry.sinks")


class Points(NamedTuple):
    """One point on each of several curves, all at the same step."""

    group: str
    axis: str
    """Name of the steps."""
    step: int
    values: dict[str, int | float]
    """Values by name of the curve."""


class Curves:
    """Names and steps of curves: ``round/loss``, ``round/batches/worker-3``, ``eval/val_loss`` and ``worker-3/loss``.

    Steps of rounds and evaluations are round numbers, those of workers count reports of this attempt.
    """

    def __init__(self) -> None:
        self._reports: Counter[str] = Counter()

    def points(self, record: Record) -> Points | None:
        """Return every number of a record; None if its kind has no curves."""
        match record.get("kind"):
            case "round" | "eval" as kind:
                by_worker = {
                    f"{name}/worker-{worker}": value
                    for name in ("batches", "batch_s")
                    for worker, value in (record.get(name) or {}).items()
                }
                return Points(kind, "round", record["round"], numbers_of(kind, {**record, **by_worker}))
            case "step":
                worker = f"worker-{record['worker']}"
                step, self._reports[worker] = self._reports[worker], self._reports[worker] + 1
                return Points(worker, f"{worker}/report", step, numbers_of(worker, record))
            case _:
                return None


def numbers_of(group: str, record: Record) -> dict[str, int | float]:
    """Return the finite numbers of a record, with a group before their names; `round` and `worker` are left out."""
    return {
        f"{group}/{name}": value
        for name, value in plain(record).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("round", "worker")
    }
