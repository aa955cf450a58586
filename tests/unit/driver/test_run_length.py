"""Figures that runs foretell of the next: rounds that epochs take, and processes that keep trainers busy."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.config.training import Checkpoint
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import described
from hypha_ray.driver.data_source import DataSource
from hypha_ray.driver.dataset_settings import length_note, with_rounds
from hypha_ray.driver.earlier_runs import generator_facts, generators_needed, is_done, standing, times_of_run
from hypha_ray.driver.start import InterruptionReport, epoch_of
from hypha_ray.errors import ConfigError
from hypha_ray.optim.schedules import inner_steps
from hypha_ray.scheduler import messages as c
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.directory import RunDirectory, quarantine
from hypha_ray.store.snapshots import rounds as snapshots
from hypha_ray.types import SLICES_PER_DATASET, SliceInfo
from tests.support.epochs import with_epochs
from tests.support.fleet import Fleet, job_of, slices_of
from tests.support.store_bench import LAYOUT, flats
from tests.unit.driver.test_summary import texts

SLICES = slices_of(train=7, samples=28, validation=1)
"""196 samples."""


def manifest_of(slices: Sequence[SliceInfo] = SLICES) -> Manifest:
    return Manifest(name="texts", modality="language", slices=tuple(slices), tensors=())


def job(epochs: int = 3, dataset: dict[str, Any] | None = None, **rounds: int) -> Job:
    sizes = {"samples_between_updates": 40, "max_batch_size": 4, "epochs": epochs, **rounds}
    return job_of(rounds=sizes, resources={"num_workers": 2}, dataset=dataset or {})


def committed(directory: RunDirectory, persisted: Sequence[c.Persist], every_rounds: int = 1) -> None:
    """Write rounds into a run directory, as its store does."""
    writer = CommitWriter(directory.path, Checkpoint(every_rounds=every_rounds, keep=99), 99)
    for persist in persisted:
        writer.commit(persist, LAYOUT, (), *flats(persist.round))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "one", "")


@pytest.fixture(scope="module")
def persisted() -> list[c.Persist]:
    return Fleet(with_epochs(job(), SLICES, 3), [0.1, 0.2], SLICES).run().persisted


def test_rounds_of_a_new_run_are_those_of_its_samples(directory: RunDirectory) -> None:
    for place in (None, directory):
        planned = with_rounds(job(), manifest_of(), place)
        assert planned.rounds.update_rounds == 15
        assert inner_steps(planned) == 15 * 5
    assert length_note(planned, manifest_of()) == "rounds.epochs = 3: 588 samples in 15 rounds"


def test_job_with_a_number_of_rounds_stays_as_it_is() -> None:
    plain = job_of(rounds={"update_rounds": 4})
    assert with_rounds(plain, manifest_of(), None) is plain
    assert length_note(plain, manifest_of()) is None


@pytest.mark.parametrize(("done", "epochs", "rounds"), [(4, 3, 15), (15, 3, 15), (15, 5, 25), (4, 1, 5)])
def test_rounds_of_a_begun_run_are_those_it_has_and_those_it_needs(
    directory: RunDirectory, persisted: list[c.Persist], done: int, epochs: int, rounds: int
) -> None:
    committed(directory, persisted[:done])
    planned = with_rounds(job(epochs), manifest_of(), directory)
    assert planned.rounds.update_rounds == rounds
    assert is_done(planned, directory) == (done == rounds)


def test_fewer_epochs_than_a_run_has_begun_are_refused(directory: RunDirectory, persisted: list[c.Persist]) -> None:
    committed(directory, persisted[:10])
    with pytest.raises(ConfigError, match=r"CFG003.*rounds.epochs is less than the run has begun.*got 1, allowed 3 or"):
        with_rounds(job(1), manifest_of(), directory)


def test_other_size_of_rounds_counts_from_the_next_round_on(
    directory: RunDirectory, persisted: list[c.Persist]
) -> None:
    committed(directory, persisted[:4])
    planned = with_rounds(job(samples_between_updates=100), manifest_of(), directory)
    assert planned.rounds.update_rounds == 4 + 5  # 428 samples are left.


def test_rounds_after_the_newest_checkpoint_count_again(directory: RunDirectory, persisted: list[c.Persist]) -> None:
    committed(directory, persisted[:4], every_rounds=50)
    assert snapshots(directory.path) == [0]
    assert with_rounds(job(), manifest_of(), directory).rounds.update_rounds == 15


def test_last_round_has_a_checkpoint_whatever_their_interval(
    directory: RunDirectory, persisted: list[c.Persist]
) -> None:
    committed(directory, persisted, every_rounds=50)
    assert snapshots(directory.path) == [0, 14]
    planned = with_rounds(job(), manifest_of(), directory)
    assert is_done(planned, directory)
    assert standing(planned, directory) == "has all of its 15 rounds"
    assert standing(with_rounds(job(5), manifest_of(), directory), directory) == "goes on after round 15 of 25"


def test_slice_that_was_left_out_counts_no_more(directory: RunDirectory, persisted: list[c.Persist]) -> None:
    committed(directory, persisted[:4])
    quarantine(directory.path, 2, "damaged")
    used = [
        span.samples for persist in persisted[:4] for _, spans in persist.spans for span in spans if span.slice == 2
    ]
    rounds = with_rounds(job(), manifest_of(), directory).rounds.update_rounds
    assert rounds == 4 + -(-(3 * 168 - (160 - sum(used))) // 40)


def test_mixture_has_its_largest_datasets_epochs_at_its_share() -> None:
    second = SLICES_PER_DATASET
    slices = [SliceInfo(0, "a", "", 30, "train"), SliceInfo(second, "b", "", 200, "train")]
    mix = [{"path": "data/code", "weight": 1}, {"path": "data/stories", "weight": 3}]
    planned = with_rounds(job(3, {"mix": mix}), manifest_of(slices), None)
    assert planned.rounds.update_rounds == 20
    note = "rounds.epochs = 3: 800 samples in 20 rounds; those of data/stories, the largest dataset, 3 times"
    assert length_note(planned, manifest_of(slices)) == note


def test_longer_warm_up_than_the_epochs_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CFG003.*warmup_rounds is more than the rounds of rounds.epochs = 1"):
        with_rounds(job(1, warmup_rounds=90), manifest_of(), None)
    assert with_rounds(job(1, warmup_rounds=5), manifest_of(), None).rounds.update_rounds == 9


def test_schedule_longer_than_the_epochs_take_is_refused() -> None:
    long = job(1).model_copy(deep=True)
    inner = long.inner_optimizer.model_copy(update={"schedule": "cosine-with-warmup", "warmup_steps": 60})
    with pytest.raises(ConfigError, match=r"OPT004.*those of the run\. Fix: lower .*, or train longer$"):
        with_rounds(long.model_copy(update={"inner_optimizer": inner}), manifest_of(), None)


def test_interruption_tells_the_rounds_of_all_once_they_are_known(
    directory: RunDirectory, persisted: list[c.Persist]
) -> None:
    committed(directory, persisted[:4])
    report = InterruptionReport(job(), directory)
    assert report.text() == "stopped after round 4"
    report.rounds = 15
    assert report.text() == "stopped after round 4 of 15"


def test_epoch_of_a_record_is_read_without_libraries(directory: RunDirectory, persisted: list[c.Persist]) -> None:
    committed(directory, persisted[:6])
    record = directory.path / "commits" / "round_000005.json"
    assert epoch_of(record) == 1
    record.write_text("{")
    assert epoch_of(record) == 0


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
