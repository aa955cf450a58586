"""A run directory with records by construction: every time in it is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypha_ray.config.load import from_tables, resolved_toml

PAYLOAD_BYTES = 4000
"""Bytes of an unencoded delta: 1000 parameters."""
EVALUATE_S = 0.5
MERGE_S = 0.1
OVERHEAD_S = 0.25
"""Seconds from a plan to a delta without evaluation and batches, the merge included."""
REDUCE_S = 0.2
COMMIT_S = 0.4
START_S = 3.0


def write_run(
    folder: Path,
    batch_s: Sequence[Sequence[float]] = ((0.1, 0.2),) * 4,
    batches: tuple[int, int] = (20, 10),
    events: Sequence[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    **tables: Any,
) -> Path:
    """Write the records of two workers.

    Args:
        folder: the run directory, which is made.
        batch_s: seconds of a batch of both workers in each round.
        batches: number of batches of both workers in each round.
        events: further lines of events.jsonl, before those of rounds.
        summary: content of summary.json; None: as of a run that has ended.
        tables: tables of the job file.

    """
    folder.mkdir(parents=True)
    samples = 4 * sum(batches)
    rounds = {"update_rounds": len(batch_s), "samples_between_updates": samples, "max_batch_size": 4}
    job = from_tables({"run": {"name": folder.name}, **tables, "rounds": rounds | tables.get("rounds", {})})
    (folder / "config.toml").write_text(resolved_toml(job), encoding="utf-8")
    metrics, round_events = _lines(batch_s, batches)
    _write_lines(folder / "metrics.jsonl", metrics)
    _write_lines(folder / "events.jsonl", [*_starts(), *events, *round_events])
    ended = {"parameter_bytes": PAYLOAD_BYTES} if summary is None else summary
    (folder / "summary.json").write_text(json.dumps(ended), encoding="utf-8")
    dataset = {"samples": {"train": 10_000, "validation": 24}}
    (folder / "provenance.json").write_text(json.dumps({"dataset": dataset}), encoding="utf-8")
    return folder


def _starts() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"kind": "attempt", "monotonic_s": 100.0, "attempt": 1, "next_round": 0}]
    for kind, at in (("hire", 100.0), ("join", 100.0 + START_S)):
        for worker in (0, 1):
            lines.append({"kind": kind, "monotonic_s": at, "worker": worker, "incarnation": 10001})
    return lines


def _lines(
    batch_s: Sequence[Sequence[float]], batches: tuple[int, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of metrics.jsonl, and those of events.jsonl about rounds."""
    metrics: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    planned_at = began_at = 100.0 + START_S
    for number, times in enumerate(batch_s):
        evaluate_s = EVALUATE_S if number else 0.0
        training_s = max(count * seconds for count, seconds in zip(batches, times, strict=True))
        finish_s = evaluate_s + OVERHEAD_S + training_s
        events.append({"kind": "plan", "monotonic_s": planned_at, "round": number})
        if number:
            metrics.append({"kind": "eval", "round": number - 1, "seconds": EVALUATE_S})
            events.append({"kind": "commit", "monotonic_s": planned_at + COMMIT_S, "round": number - 1})
        for worker, (count, seconds) in enumerate(zip(batches, times, strict=True)):
            step = {"kind": "step", "worker": worker, "round": number, "samples": 2 * count, "batch_s": seconds}
            metrics += [step, step]
        planned_at += finish_s + REDUCE_S
        metrics.append(
            {
                "kind": "round",
                "round": number,
                "time_s": finish_s + REDUCE_S + MERGE_S,
                "finish_s": finish_s,
                "sync_s": REDUCE_S + MERGE_S,
                "elapsed_s": planned_at + MERGE_S + EVALUATE_S - began_at,
                "batches": {"0": batches[0], "1": batches[1]},
                "batch_s": {"0": times[0], "1": times[1]},
                "workers": 2,
                "bytes_up": 2 * PAYLOAD_BYTES,
                "bytes_down": 2 * PAYLOAD_BYTES,
                "rejected": 0,
                "samples": 4 * sum(batches),
                "idle_fraction": 0.05,
                "data_wait_fraction": 0.0,
            }
        )
    metrics.append({"kind": "eval", "round": len(batch_s) - 1, "seconds": EVALUATE_S})
    events.append({"kind": "plan", "monotonic_s": planned_at, "round": len(batch_s)})
    events.append({"kind": "commit", "monotonic_s": planned_at + COMMIT_S, "round": len(batch_s) - 1})
    return metrics, events


def _write_lines(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
