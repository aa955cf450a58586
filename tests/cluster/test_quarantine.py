"""Slices that are damaged: the job goes on without them where it may, and loses nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.data.catalogue import load
from hypha_ray.driver.attempts import records
from hypha_ray.driver.data_source import in_folder
from hypha_ray.errors import DataError
from hypha_ray.store.directory import RunDirectory, quarantine, quarantined
from hypha_ray.types import SliceInfo
from tests.support.faults import events
from tests.support.jobs import job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")

ROUNDS = {"update_rounds": 8, "samples_between_updates": 240, "max_batch_size": 8}


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
