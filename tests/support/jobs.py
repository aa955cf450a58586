"""What tests of whole jobs share: a small dataset, a small model, and a way to run a job on the Ray that is there."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.data.storage import Place
from hypha_ray.driver.attempts import end_leftovers, records
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.launch import finish
from hypha_ray.store.directory import RunDirectory
from hypha_ray.types import Span

MODEL = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def job_of(name: str, dataset: Path, /, workers: list[dict[str, Any]] | None = None, **tables: dict[str, Any]) -> Job:
    """A small job, in groups of `workers` if there are some; tables given here are laid over it."""
    base: dict[str, Any] = {
        "run": {"name": name},
        "model": {"config": MODEL},
        "dataset": {"path": str(dataset)},
        "rounds": {"update_rounds": 3, "samples_between_updates": 64, "max_batch_size": 4},
        "inner_optimizer": {"learning_rate": 3e-3},
        "resources": {"num_workers": 2},
        "telemetry": {"sinks": ["jsonl"], "plots": False},
    }
    for table, values in tables.items():
        base[table] = {**base.get(table, {}), **values}
    return Job.model_validate(base | {"workers": workers or []})


@dataclass
class Outcome:
    """A finished run."""

    directory: Path
    records: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def commits(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted((self.directory / "commits").glob("round_*.json"))]

    def used(self) -> Counter[tuple[int, int, int]]:
        """How often each (epoch, slice, sample) is in a commit."""
        return Counter(
            (span.epoch, span.slice, sample)
            for workers in self.spans()
            for spans in workers.values()
            for span in spans
            for sample in range(span.start, span.stop)
        )

    def spans(self) -> list[dict[int, list[Span]]]:
        """For each round and worker the spans that were trained on."""
        return [
            {int(worker): [Span(*span) for span in spans] for worker, spans in commit["spans"].items()}
            for commit in self.commits()
        ]


def run_job(
    job: Job,
    parent: Path,
    dataset: Path,
    export: bool = False,
    seen: Callable[[dict[str, Any]], None] | None = None,
    place: Place | None = None,
    until: Callable[[], bool] = bool,
) -> Outcome:
    """Run a job to its end on the Ray cluster that this process is connected to.

    `seen` is shown every record; `place` has the slices, by default the folder of the dataset. `until` is asked after
    each record, and ends the job once it is true.
    """
    assert job.run.name is not None
    if RunDirectory(parent / job.run.name).begun:
        shutil.rmtree(parent / job.run.name)  # Of a test's first try.
    directory = RunDirectory.create(parent, job.run.name, resolved_toml(job))
    outcome, source = Outcome(directory.path, []), in_folder(dataset)
    source = source if place is None else replace(source, places=(place,))
    running = records(job, job.run.name, directory, source)
    for record in running:
        outcome.records.append(record)
        if seen is not None:
            seen(record)
        if until():
            running.close()
            end_leftovers(job.run.name)  # Leases last as long as this process otherwise.
    if export:
        finish(job, directory, in_folder(dataset))
    return outcome
