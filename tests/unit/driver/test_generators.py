"""Number of processes that keep trainers busy: the rule, and the measurements that a summary takes it from."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.data.mixture import described
from hypha_ray.driver.data_source import DataSource
from hypha_ray.driver.earlier_runs import generator_facts, generators_needed, times_of_run
from tests.unit.driver.test_summary import texts


def waiting_share(trainers: int, generators: int, generation_s: float, training_s: float) -> float:
    """Share of their time that trainers wait in, with batches made in turn and taken in turn, after a long start."""
    free_at = [0.0] * generators
    made_at = []
    for _ in range(4000):
        end = heapq.heappop(free_at) + generation_s
        made_at.append(end)
        heapq.heappush(free_at, end)
    ready_at = [0.0] * trainers
    waited = worked = 0.0
    for number, end in enumerate(sorted(made_at)):
        now = heapq.heappop(ready_at)
        if number > 2000:
            waited += max(0.0, end - now)
            worked += training_s
        heapq.heappush(ready_at, max(now, end) + training_s)
    return waited / (waited + worked)


@pytest.mark.parametrize("trainers", [1, 2, 5])
@pytest.mark.parametrize("generation_s", [0.1, 0.9, 1.1, 2.6, 7.3])
def test_needed_generators_are_the_fewest_with_which_no_trainer_waits(trainers: int, generation_s: float) -> None:
    needed = generators_needed(trainers, generation_s, 1.0)
    assert waiting_share(trainers, needed, generation_s, 1.0) < 0.005
    assert needed == 1 or waiting_share(trainers, needed - 1, generation_s, 1.0) > 0.01


def rl_job(folder: Path, runs: Path, name: str, *flags: str) -> Job:
    tables = ["--dataset.path", str(folder), "--run.dir", str(runs), "--run.name", name, "--rl.algorithm", "grpo"]
    return load([*tables, "--rl.reward.functions", '["exact"]', "--inner_optimizer.learning_rate=1e-2", *flags]).job


def write_run(job: Job, source: DataSource, records: Iterable[dict[str, Any]]) -> Path:
    """Write the files of a run with these figures of its rounds."""
    folder = Path(str(job.run.dir), str(job.run.name))
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(resolved_toml(job))
    (folder / "dataset.json").write_text(described(source.manifest))
    lines = [json.dumps({"kind": "round", "round": number, **figures}) for number, figures in enumerate(records)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "events.jsonl").write_text(json.dumps({"kind": "join", "worker": 0, "device": "cpu"}) + "\n")
    return folder


MEASURED = [
    {"generation_s": 90.0, "training_s": 0.1},  # Libraries were loaded.
    {"generation_s": 2.0, "training_s": 0.5},
    {"generation_s": 3.0, "training_s": 0.8},
    {"generation_s": 2.5, "training_s": 0.7},
]


def test_a_summary_has_the_number_by_an_earlier_run_and_none_without_a_measurement(tmp_path: Path) -> None:
    source, runs = texts(tmp_path / "data"), tmp_path / "runs"
    job = rl_job(source.folder, runs, "second", "--resources.num_workers=2", "--rl.model_workers=3", "--rl.staleness=1")
    assert list(generator_facts(job, source.manifest)) == []
    write_run(rl_job(source.folder, runs, "old"), source, [{"reward": 0.5}] * 4)
    assert list(generator_facts(job, source.manifest)) == []
    write_run(rl_job(source.folder, runs, "first"), source, MEASURED)
    times = times_of_run(runs / "first")
    assert times is not None and (times.generation_s, times.training_s, times.rounds) == (2.5, 0.7, 3)
    [(subject, text)] = generator_facts(job, source.manifest)
    assert subject == "responses"
    assert text == (
        "8 model workers responding would keep 2 trainers busy: 2.5 s of responding and 0.7 s of training a batch, "
        "the medians of 3 rounds of run first on cpu"
    )


@pytest.mark.parametrize("flag", ["--rl.group_size=4", "--rl.generation.max_response_tokens=9", "--rl.epochs=2"])
def test_runs_of_other_work_have_no_times_for_a_job(tmp_path: Path, flag: str) -> None:
    source, runs = texts(tmp_path / "data"), tmp_path / "runs"
    write_run(rl_job(source.folder, runs, "first"), source, MEASURED)
    assert list(generator_facts(rl_job(source.folder, runs, "second", flag), source.manifest)) == []
