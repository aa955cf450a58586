"""Second start of a run: the same command goes on only with what the run began with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.driver.data_source import DataSource, in_folder
from hypha_ray.driver.earlier_runs import keep_identity, known_identity, with_identity
from hypha_ray.errors import CheckpointError
from hypha_ray.store.directory import RunDirectory
from tests.support.jobs import MODEL


@pytest.fixture
def source(corpus: Path, tmp_path: Path) -> DataSource:
    return in_folder(shutil.copytree(corpus, tmp_path / "texts"))


def begun(tmp_path: Path, source: DataSource, **tables: Any) -> tuple[Job, RunDirectory]:
    job = Job.model_validate({"model": {"config": MODEL}, "run": {"name": "one", "dir": str(tmp_path)}, **tables})
    directory = RunDirectory.create(tmp_path, "one", resolved_toml(job))
    keep_identity(with_identity(job, directory, source, resume=False), directory)
    return job, directory


def test_tokenizer_beside_the_slices_that_was_replaced_is_refused(source: DataSource, tmp_path: Path) -> None:
    job, directory = begun(tmp_path, source)
    assert with_identity(job, directory, source, resume=False).begun_with == known_identity(directory)
    made_by = source.manifest.preprocessor
    assert made_by is not None and made_by.folder is not None
    file = source.folder / made_by.folder / "tokenizer_config.json"
    file.write_text(file.read_text() + " ")
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=r"CKPT007.*dataset's tokenizer"):
            with_identity(job, directory, source, resume)


def test_other_reward_function_is_taken_with_resume_alone(
    source: DataSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "rewards_of_a_resumed_run.py"
    module.write_text("def right(response):\n    return 1.0\n")
    name = "rewards_of_a_resumed_run:right"
    job, directory = begun(tmp_path, source, rl={"algorithm": "grpo", "reward": {"functions": [name]}})
    module.write_text("def right(response):\n    return 0.0\n")
    with pytest.raises(CheckpointError, match="CKPT007"):
        with_identity(job, directory, source, resume=False)
    keep_identity(with_identity(job, directory, source, resume=True), directory)
    assert f"{name} has changed; it is taken as it is here" in capsys.readouterr().err
    with_identity(job, directory, source, resume=False)
