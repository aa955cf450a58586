"""Names of folders that a driver hands over to actors, which run in another working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import with_absolute_folders
from hypha_ray.config.training import Dataset
from hypha_ray.data.catalogue import locate
from hypha_ray.market import cluster
from hypha_ray.market.selection import training_key


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two folders."""
    for name in ("weights", "texts"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_of_a_job_are_found_from_any_working_directory(here: Path) -> None:
    reward = {"rl": {"reward": {"model": {"repository": "weights"}}}}
    given = {"model": {"repository": "weights"}, "preprocessor": {"repository": "./texts"}, **reward}
    job = with_absolute_folders(Job.model_validate(given))
    assert (job.model.repository, job.preprocessor.repository) == (f"{here}/weights", f"{here}/texts")
    assert job.rl.reward.model.repository == f"{here}/weights"
    assert locate(Dataset(path="texts")) == here / "texts"


def test_names_of_a_hub_stay(here: Path) -> None:
    job = Job.model_validate({"model": {"repository": "owner/weights"}})
    assert with_absolute_folders(job) == job


def test_a_training_keeps_its_speeds_whatever_its_folder_is_called(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Job.model_validate({"model": {"repository": "weights"}, "resources": {"strategy": "value"}})
    asked: list[str] = []
    monkeypatch.setattr(cluster, "posted_speeds", asked.append)
    cluster.speeds_of(given, {"input_ids": (8,)})
    assert asked == [training_key(with_absolute_folders(given), {"input_ids": (8,)})]
    assert asked != [training_key(given, {"input_ids": (8,)})]
