"""Damaged samples, slices and deltas: each is named and left out, and nothing else is lost."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.data.catalogue import load
from hypha_ray.driver.attempts import records
from hypha_ray.driver.data_source import in_folder
from hypha_ray.errors import DataError
from hypha_ray.store.directory import RunDirectory, quarantine, quarantined
from hypha_ray.types import SliceInfo
from tests.support.faults import events, survive
from tests.support.jobs import Outcome, job_of, run_job
from tests.support.prepared import prepared
from tests.support.small_models import VIT

pytestmark = pytest.mark.usefixtures("local_ray")

BAD = 17
ROUNDS = {"update_rounds": 8, "samples_between_updates": 240, "max_batch_size": 8}
POISONS = ("nan", "inf", "huge", "shape", "dtype", "names")
HARMLESS = ("repeat", "stale")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bare slices of digits, one pixel of one training image of which overflows."""
    whole, out = tmp_path_factory.mktemp("digits") / "whole", tmp_path_factory.mktemp("bare")
    prepared("digits", whole, samples_per_slice=48, max_samples=96, validation_samples=32)
    for number, info in enumerate(load(whole).of("train")):
        arrays = load_file(whole / info.file)
        if number == 1:
            arrays["images"][BAD, 0, 3, 3] = 3e38
        save_file(arrays, out / f"part-{number}.safetensors")
    return out


@pytest.mark.parametrize("tables", [{}, {"dataset": {"allow_quarantine": True}}, {"sync": {"strategy": "sync"}}])
@pytest.mark.long(keep=1)
def test_run_with_a_damaged_image_ends_well_and_names_it(images: Path, tmp_path: Path, tables: dict[str, Any]) -> None:
    folder = shutil.copytree(images, tmp_path / "images")
    rounds = {"update_rounds": 4, "samples_between_updates": 96, "max_batch_size": 8}
    model = {"config": VIT | {"hidden_size": 16, "intermediate_size": 16}, "type": "image-classification"}
    tables = {**tables, "dataset": {"path": str(folder), **tables.get("dataset", {})}}
    outcome = run_job(job_of("one-bad", folder, model=model, rounds=rounds, **tables), tmp_path, folder, export=True)
    named = {(event["slice"], event["sample"]) for event in events(outcome, "damaged")}
    assert named == {(1, BAD)}
    assert not events(outcome, "exclude") and not events(outcome, "reject") and not events(outcome, "loss")
    records = outcome.of_kind("round")
    assert [record["round"] for record in records] == [0, 1, 2, 3]
    assert all(math.isfinite(record["loss"]) for record in records)
    left_out = 96 - records[-1]["scored"]
    assert left_out == (1 if "allow_quarantine" in tables["dataset"] else 8)
    assert set(outcome.used().values()) == {1}
    assert records[-1]["tokens"] is None and "tokens_per_s" not in records[-1] and records[-1]["samples_per_s"] > 0


@pytest.fixture
def damaged(corpus: Path, tmp_path: Path) -> Path:
    """The corpus with a bit flipped in one slice and another one cut off, one of them for validation."""
    folder = shutil.copytree(corpus, tmp_path / "damaged")
    flipped, cut = folder / of_split(folder, "train")[7].file, folder / of_split(folder, "validation")[0].file
    content = bytearray(flipped.read_bytes())
    content[-5] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:100])
    return folder


def of_split(folder: Path, split: str) -> list[SliceInfo]:
    return [info for info in load(folder).slices if info.split == split]


def allowing(name: str, dataset: Path) -> Job:
    return job_of(name, dataset, rounds=ROUNDS, dataset={"allow_quarantine": True})


def test_damaged_slices_are_set_aside_and_everything_else_is_used_once(damaged: Path, tmp_path: Path) -> None:
    train, bad = of_split(damaged, "train"), of_split(damaged, "train")[7].index
    aside = {bad, of_split(damaged, "validation")[0].index}
    outcome = run_job(allowing("aside", damaged), tmp_path, damaged)
    assert [commit["round"] for commit in outcome.commits()] == list(range(8))
    assert set(quarantined(outcome.directory)) == aside == {event["slice"] for event in events(outcome, "quarantine")}
    counts = outcome.used()
    assert set(counts.values()) == {1}
    first = {(index, sample) for epoch, index, sample in counts if epoch == 0}
    assert first == {(info.index, n) for info in train if info.index != bad for n in range(info.samples)}
    assert outcome.of_kind("summary")[0]["slices_quarantined"] == 2
    assert not events(outcome, "loss")
    later = [event["kept"] for event in events(outcome, "lease")][2:]
    assert later and all(later)


def test_dataset_without_a_sound_slice_ends_the_run_and_says_so(corpus: Path, tmp_path: Path) -> None:
    job = job_of("nothing", corpus)
    directory = RunDirectory.create(tmp_path, "nothing", resolved_toml(job))
    for info in of_split(corpus, "train"):
        quarantine(directory.path, info.index, "cut off")
    with pytest.raises(DataError, match=r"DATA028.*nothing to train on is left: 15 slices are damaged — got cut off"):
        list(records(job, "nothing", directory, in_folder(corpus)))


def test_missing_slice_ends_the_run_without_being_set_aside(corpus: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(corpus, tmp_path / "damaged")

    def remove(record: dict[str, Any]) -> None:
        for info in of_split(corpus, "train") if record["kind"] == "step" else ():
            (folder / info.file).unlink(missing_ok=True)

    with pytest.raises(DataError, match=r"DATA010.*can't be read"):
        run_job(allowing("missing", folder), tmp_path, folder, seen=remove)
    assert not quarantined(tmp_path / "missing")


@pytest.fixture(scope="module")
def run_with(local_ray: None, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """A replayable run of three workers in which worker 1's payloads are damaged, one way a round, after the first."""

    @cache
    def run(*ways: str) -> Outcome:
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": f"poison-{ways[0]}", "mode": "replay"},
            "rounds": {"update_rounds": len(ways) + 2, "samples_between_updates": 48, "evaluate_every": 0},
            "resources": {"num_workers": 3, "min_workers": 3},
            "sync": {"strikes": len(ways) + 1},
        }
        specs = [f"worker.payload:1={way}@{hit}" for hit, way in enumerate(ways, 2)]
        folder = tmp_path_factory.mktemp(ways[0])
        return survive(f"poison-{ways[0]}", corpus, folder, specs, len(ways), **tables)

    return run


def hashes(run: Outcome) -> list[str]:
    return [commit["theta_sha256"] for commit in run.commits()]


def test_poisoned_delta_is_rejected_and_the_round_is_as_without_it(run_with: Callable[..., Outcome]) -> None:
    """In every round two ways are compared: as if the delta weren't there, so one is as good as the other."""
    run, other = run_with(*POISONS), run_with(*reversed(POISONS))
    first, *damaged, last = run.commits()
    assert [[one["worker"] for one in commit["rejected"]] for commit in damaged] == [[1]] * len(POISONS)
    assert [[one["worker"] for one in commit["deltas"]] for commit in damaged] == [[0, 2]] * len(POISONS)
    assert [event["worker"] for event in events(run, "reject")] == [1] * len(POISONS)
    assert hashes(run) == hashes(other)
    assert [one["worker"] for one in first["deltas"]] == [one["worker"] for one in last["deltas"]] == [0, 1, 2]


def test_repeated_and_late_deltas_change_nothing(run_with: Callable[..., Outcome]) -> None:
    run, other = run_with(*HARMLESS), run_with(*reversed(HARMLESS))
    assert events(run, "stale") and events(other, "stale")
    assert hashes(run) == hashes(other)
    assert all([delta["worker"] for delta in commit["deltas"]] == [0, 1, 2] for commit in run.commits())
    assert hashes(run)[1] != hashes(run_with(*POISONS))[1]
