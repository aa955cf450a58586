"""Figures of a whole run, which `summary.json` has in the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypha_ray.figures import Objective, objective_of, shown_beside
from hypha_ray.fleet_time import FleetTime
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, SUMMARY, Record, by_round, of_kind, read_json

WARM_UP_ROUNDS = 2
"""First rounds, in which the planner doesn't know the workers' speeds; left out of the mean idle fraction."""
RECORDED_BYTES = "recorded_bytes"
"""Field of summary.json with the sizes of the files that it was made of, by their names."""


def summary(
    records: Iterable[Record], events: Iterable[Record] = (), parameter_bytes: int | None = None
) -> dict[str, Any]:
    """Summarize a run.

    Args:
        records: lines of metrics.jsonl, in order.
        events: lines of events.jsonl.
        parameter_bytes: size of a gradient, to compare the run's traffic with an exchange at every inner step.

    Returns:
        The fields of summary.json; None where a run has no such figure.

    """
    records = list(records)
    events = list(events)
    rounds = by_round(records, "round")
    evaluations = by_round(records, "eval")
    planned_rounds = [record for record in rounds if record["round"] >= WARM_UP_ROUNDS]
    plan_errors = _measured(rounds, "plan_error")
    costs = [event["cost"] for event in of_kind(events, "cost")]
    return {
        "rounds": len(rounds),
        "epochs": rounds[-1].get("epoch") if rounds else None,
        **_work(rounds),
        **_quality(rounds, evaluations),
        "ended_early": ended_early(events),
        **_fleet_time(rounds, events),
        "idle_fraction": _mean(_measured(planned_rounds, "idle_fraction")),
        "plan_error": _mean([abs(error) for error in plan_errors]),
        "peak_memory_bytes": _peak_memory(rounds),
        **_traffic(rounds, parameter_bytes),
        "rejected": int(_total(rounds, "rejected")),
        "workers_lost": len(of_kind(events, "loss")),
        "cost": sum(costs) if costs else None,
        "slices_quarantined": len({event["slice"] for event in of_kind(events, "quarantine")}),
    }


def recorded_bytes(directory: Path) -> dict[str, int]:
    """Sizes of the files that a summary is made of, by their names; a missing one has none."""
    paths = (directory / METRICS, directory / EVENTS)
    return {path.name: path.stat().st_size for path in paths if path.exists()}


def recorded_summary(directory: Path) -> Record | None:
    """Return summary.json; None without one, and if a record was written since: then it tells of an earlier attempt.

    Raises:
        OSError: a file can't be read.

    """
    figures = read_json(directory / SUMMARY)
    if figures.get(RECORDED_BYTES) != recorded_bytes(directory):
        return None
    return figures


def _fleet_time(rounds: list[Record], events: list[Record]) -> dict[str, Any]:
    """Goodput, and shares of the fleet's time; None for records of an earlier version, which lack it."""
    samples = 0
    for record in rounds:
        if record.get("fleet_s") is not None:
            samples += record["samples"]
    time = FleetTime.of_records([*rounds, *of_kind(events, "fleet_time")])
    fields = time.record(samples)
    return {"goodput": fields["goodput"], "time_shares": fields["time_shares"]}


def ended_early(events: Iterable[Record]) -> str | None:
    """Reason for which the last attempt ended before all rounds; None if it didn't."""
    starts_and_stops = of_kind(events, "attempt", "stop")
    return starts_and_stops[-1].get("reason") if starts_and_stops else None


def _work(rounds: list[Record]) -> dict[str, Any]:
    # A resumed run may count its elapsed time from the resumption; the sum over rounds is then the longer one.
    elapsed_s = _since(rounds, "elapsed_s", "time_s") or 0.0
    seconds = max(elapsed_s, _total(rounds, "time_s"))
    samples = _since(rounds, "samples_total", "samples")
    tokens = _since(rounds, "tokens_total", "tokens")
    return {
        "samples": int(samples or 0),
        "tokens": None if tokens is None else int(tokens),
        "seconds": seconds,
        "samples_per_s": _per_second(samples, seconds),
        "tokens_per_s": _per_second(tokens, seconds),
        "mfu": _utilisation(rounds),
    }


def _per_second(count: float | None, seconds: float) -> float | None:
    if count is None or not seconds:
        return None
    return count / seconds


def _utilisation(rounds: list[Record]) -> float | None:
    """Mean utilisation over the time of all rounds; None if one of them has none."""
    seconds = _total(rounds, "time_s")
    if not seconds or any(record.get("mfu") is None for record in rounds):
        return None
    return math.fsum(record["mfu"] * record["time_s"] for record in rounds) / seconds


def _peak_memory(rounds: Iterable[Record]) -> int | None:
    """Most memory of any worker in any round; None if none has reported it."""
    peaks: list[int] = []
    for record in rounds:
        peak_by_worker = record.get("peak_memory_bytes") or {}
        peaks += peak_by_worker.values()
    return max(peaks, default=None)


def _since(rounds: list[Record], total: str, per_round: str) -> float | None:
    """Sum that these rounds have added to a total of the run, without the rounds before them."""
    if not rounds or rounds[-1].get(total) is None:
        return None
    first = rounds[0]
    earlier_total = 0.0
    if first["round"]:
        earlier_total = (first.get(total) or 0) - (first.get(per_round) or 0)
    return float(rounds[-1][total] - max(0.0, earlier_total))


def _quality(rounds: list[Record], evaluations: list[Record]) -> dict[str, Any]:
    objective = objective_of(evaluations)
    measured = [record for record in evaluations if record.get(objective.name) is not None]
    best = objective.best(measured, key=lambda record: float(record[objective.name]), default=None)
    last_round: Record = rounds[-1] if rounds else {}
    last_evaluation: Record = measured[-1] if measured else {}
    return {
        "loss": last_round.get("loss"),
        **_evaluation(objective, last_evaluation, ""),
        **_evaluation(objective, best or {}, "best_"),
        "best_round": best and best["round"],
    }


def _evaluation(objective: Objective, record: Record, prefix: str) -> dict[str, Any]:
    names = [objective.name, *shown_beside(objective, record)]
    return {prefix + name: record.get(name) for name in names}


def _traffic(rounds: list[Record], parameter_bytes: int | None) -> dict[str, Any]:
    up = int(_total(rounds, "bytes_up"))
    steps = 0
    for record in rounds:
        batches_by_worker = record.get("batches") or {}
        steps += sum(batches_by_worker.values())
    every_step = None if parameter_bytes is None else steps * parameter_bytes
    ratio = None
    if every_step is not None and up:
        ratio = every_step / up
    return {
        "bytes_up": up,
        "bytes_down": int(_total(rounds, "bytes_down")),
        "inner_steps": steps,
        "every_step_bytes": every_step,
        "traffic_ratio": ratio,
    }


def _measured(records: Iterable[Record], name: str) -> list[float]:
    """Values of a field, of the records that have one."""
    values = [record.get(name) for record in records]
    return [value for value in values if value is not None]


def _total(records: Iterable[Record], name: str) -> float:
    return math.fsum(_measured(records, name))


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
