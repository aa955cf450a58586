"""What a driver hands over to actors, which run in other folders than it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.config import Job
from hypha_ray.config.folders import with_absolute_folders
from hypha_ray.config.tables.dataset import Dataset
from hypha_ray.data.catalogue import locate


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two folders."""
    for name in ("weights", "texts"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_of_a_job_are_found_from_any_working_directory(here: Path) -> None:
    job = with_absolute_folders(
        Job.model_validate({"model": {"repository": "weights"}, "preprocessor": {"repository": "./texts"}})
    )
    assert (job.model.repository, job.preprocessor.repository) == (f"{here}/weights", f"{here}/texts")
    assert locate(Dataset(path="texts")) == here / "texts"


def test_names_of_a_hub_stay(here: Path) -> None:
    job = Job.model_validate({"model": {"repository": "owner/weights"}})
    assert with_absolute_folders(job) == job
