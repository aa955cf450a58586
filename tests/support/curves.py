"""Runs written by trackers, and the curves that they have of a run's records."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from hypha_ray.telemetry.sinks.base import build


def expected_curves(records: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Curves of the records, worked out one number at a time."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    reports: dict[int, int] = defaultdict(int)
    for record in records:
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        group, step = record["kind"], record["round"]
        if group == "step":
            worker = numbers.pop("worker")
            group, step = f"worker-{worker}", reports[worker]
            reports[worker] += 1
        for name in ("batches", "batch_s"):
            by_worker = record.get(name)
            if isinstance(by_worker, dict):
                numbers |= {f"{name}/worker-{worker}": value for worker, value in by_worker.items()}
        shares = record.get("time_shares") or {}
        numbers |= {f"time_shares/{use}": share for use, share in shares.items()}
        numbers.pop("round")
        for name, value in numbers.items():
            curves[f"{group}/{name}"].append((step, value))
    return curves


def track(directory: Path, records: list[dict[str, Any]], sink: str, config: dict[str, Any]) -> None:
    """Write the records of a run and a summary by one sink, which loses none."""
    sinks = build(directory, "fleet", [sink], patience_s=240.0)
    sinks.start(config)
    for record in records:
        sinks.record(record)
    sinks.summary({"rounds": 2, "loss": 2.5})
    sinks.close()
    assert sinks.losses()[sink] == {"failed": 0, "dropped": 0}
