"""Directories of runs as training leaves them: job file, commits, metrics, events and provenance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from html import unescape
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.series import RECORDED_BYTES, recorded_bytes, summary
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, SUMMARY, JsonLines, read_jsonl, write_json

TABLES: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "dataset": {"path": "data/texts"},
    "rounds": {"update_rounds": 3},
}


def round_record(number: int, loss: float, **fields: Any) -> dict[str, Any]:
    """Record of a round of 10 samples, which took 2 s."""
    return {
        "kind": "round",
        "round": number,
        "rounds": 3,
        "time_s": 2.0,
        "loss": loss,
        "samples": 10,
        "samples_total": 10 * (number + 1),
        "workers": 2,
        "batches": {"0": 3, "1": 2},
        "bytes_up": 1000,
        "bytes_down": 500,
        "elapsed_s": 2.0 * (number + 1),
        **fields,
    }


def evaluation(number: int, val_loss: float | None, **fields: Any) -> dict[str, Any]:
    return {"kind": "eval", "round": number, "val_loss": val_loss, **fields}


def make_run(
    parent: Path,
    name: str = "first",
    commits: int = 0,
    metrics: Iterable[Mapping[str, Any]] = (),
    events: Iterable[Mapping[str, Any]] = (),
    provenance: Mapping[str, Any] | None = None,
    **tables: Any,
) -> Path:
    """Make the directory of a run; the records of its commits are empty, since only their names are read."""
    job = Job.model_validate({**TABLES, **tables})
    folder = RunDirectory.create(parent, name, resolved_toml(job)).path
    for number in range(commits):
        (folder / "commits").mkdir(exist_ok=True)
        (folder / "commits" / f"round_{number:06d}.json").write_text("{}")
    for file, records in (("metrics.jsonl", metrics), ("events.jsonl", events)):
        lines = JsonLines(folder / file)
        for record in records:
            lines.write(record)
        lines.close()
    if provenance is not None:
        (folder / "provenance.json").write_text(json.dumps(provenance))
    return folder


def end_run(folder: Path, **figures: Any) -> None:
    """Write the summary of a run, as its telemetry actor does in the end."""
    sizes = recorded_bytes(folder)
    whole = summary(read_jsonl(folder / METRICS), read_jsonl(folder / EVENTS))
    write_json(folder / SUMMARY, {**whole, **figures, RECORDED_BYTES: sizes})


def charts_of_page(text: str) -> dict[str, dict[str, Any]]:
    """Charts of a page by their titles."""
    (data,) = re.findall(r'<script type="application/json" id="figure-data">(.*?)</script>', text)
    titles = re.findall(r"<figcaption><h3>(.*?)</h3>", text)
    return dict(zip(map(unescape, titles), json.loads(data), strict=True))
