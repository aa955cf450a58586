"""Second start of a run: it goes on only with what it began with; a manifest's copy is kept for the end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.config.training import Dataset, DatasetShare
from hypha_ray.data.catalogue import load
from hypha_ray.data.manifest import Manifest, PreprocessorInfo, TensorInfo
from hypha_ray.data.mixture import mixed
from hypha_ray.driver.data_source import COPY, DataSource, in_folder, run_copy
from hypha_ray.driver.earlier_runs import keep_identity, known_identity, with_identity
from hypha_ray.errors import CheckpointError, DataError
from hypha_ray.store.directory import RunDirectory
from hypha_ray.types import SliceInfo
from tests.support.jobs import MODEL

ONE, TWO = (SliceInfo(number, f"{number}.safetensors", f"{number}" * 64, 10 + number) for number in (0, 1))


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


def manifest(*slices: SliceInfo, name: str = "texts", preprocessor: PreprocessorInfo | None = None) -> Manifest:
    tensors = (TensorInfo("input_ids", "int32", (8,), 0, 9),)
    return Manifest(name=name, modality="language", slices=slices, tensors=tensors, preprocessor=preprocessor)


def test_identity_of_a_dataset_is_that_of_its_samples_and_not_of_its_names() -> None:
    renamed = SliceInfo(0, "other.safetensors", ONE.sha256, ONE.samples)
    other = manifest(TWO, renamed, name="other", preprocessor=PreprocessorInfo("gpt2"))
    assert other.identity == manifest(ONE, TWO).identity


def test_identity_of_a_dataset_changes_with_a_slice_its_size_place_or_split() -> None:
    changed = [
        SliceInfo(0, ONE.file, "f" * 64, ONE.samples),
        SliceInfo(0, ONE.file, ONE.sha256, ONE.samples + 1),
        SliceInfo(2, ONE.file, ONE.sha256, ONE.samples),
        SliceInfo(0, ONE.file, ONE.sha256, ONE.samples, "validation"),
    ]
    found = {manifest(TWO, one).identity for one in (ONE, *changed)} | {manifest(TWO).identity}
    assert len(found) == len(changed) + 2


def test_copy_of_a_mixture_is_read_as_one(tmp_path: Path, corpus: Path) -> None:
    manifest = mixed([load(corpus), load(corpus)])
    (tmp_path / COPY).mkdir()
    manifest.save(tmp_path / COPY)
    shares = [DatasetShare(path=str(corpus)), DatasetShare(path=str(corpus), weight=2.0)]
    assert run_copy(Dataset(mix=shares), RunDirectory(tmp_path)).manifest.slices == manifest.slices
    with pytest.raises(DataError, match="DATA003"):
        run_copy(Dataset(path=str(corpus)), RunDirectory(tmp_path))
