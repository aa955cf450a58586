"""Sizes of a recorded run's data, from the manifests of its datasets."""

from __future__ import annotations

import json
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.data.manifest import Manifest, TensorInfo
from hypha_ray.driver.what_if import RunSizes
from tests.support.fleet import job_of, slices_of

WEIGHTS = (2.0, 1.0)


def mixture(folder: Path, train: int, names: tuple[str, ...] = ("code", "stories")) -> Job:
    """Job of a run in this folder, on a dataset of `train` slices and on one of three; these datasets are there."""
    sizes = {"code": (train, 28), "stories": (3, 30)}
    for name in names:
        slices = slices_of(*sizes[name], validation=1)
        tensors = (TensorInfo(name="input_ids", dtype="int32", shape=(32,), minimum=0, maximum=99),)
        (folder / name).mkdir()
        for info in slices:
            (folder / name / info.file).touch()
        Manifest(name=name, modality="language", slices=tuple(slices), tensors=tensors).save(folder / name)
    places = [str(folder / name) for name in sizes]
    (folder / "provenance.json").write_text(json.dumps({"dataset": {"places": places}}))
    shares = [{"path": place, "weight": weight} for place, weight in zip(places, WEIGHTS, strict=True)]
    rounds = {"samples_between_updates": 40, "max_batch_size": 4, "epochs": 3}
    return job_of(rounds=rounds, dataset={"mix": shares})


def test_epoch_of_a_mixture_is_that_of_its_largest_dataset_at_its_share(tmp_path: Path) -> None:
    job = mixture(tmp_path, train=7)
    sizes = RunSizes(tmp_path)(job)
    assert sizes.epoch_samples == 7 * 28 * 3 // 2
    assert (sizes.slice_samples, sizes.sample_bytes) == (30, 32 * 4)
    assert sizes.notes == ()


def test_largest_dataset_may_be_the_one_with_the_smaller_weight(tmp_path: Path) -> None:
    job = mixture(tmp_path, train=1)
    assert RunSizes(tmp_path)(job).epoch_samples == 3 * 30 * 3


def test_epoch_of_a_mixture_without_all_of_its_datasets_is_unknown_and_said_so(tmp_path: Path) -> None:
    job = mixture(tmp_path, train=7, names=("code",))
    sizes = RunSizes(tmp_path)(job)
    assert sizes.epoch_samples is None
    assert sizes.notes == ("datasets of the mixture aren't there, so an epoch is taken to have all samples once",)
