"""One damaged image among ninety-six: it is named, and the run goes on to its end as if it weren't there."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from hypha_ray.data.catalogue import load
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from tests.support.faults import events
from tests.support.jobs import job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")

VIT = {
    "model_type": "vit",
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_labels": 10,
}
BAD = 17


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bare slices of digits, one pixel of one training image of which overflows."""
    whole, out = tmp_path_factory.mktemp("digits") / "whole", tmp_path_factory.mktemp("bare")
    prepare(
        PrepareOptions("digits", whole, samples_per_slice=48, max_samples=96, validation_samples=32),
        lambda what, n: None,
    )
    for number, info in enumerate(load(whole).of("train")):
        arrays = load_file(whole / info.file)
        if number == 1:
            arrays["images"][BAD, 0, 3, 3] = 3e38
        save_file(arrays, out / f"part-{number}.safetensors")
    return out


@pytest.mark.parametrize("tables", [{}, {"dataset": {"allow_quarantine": True}}, {"sync": {"strategy": "sync"}}])
def test_run_with_a_damaged_image_ends_well_and_names_it(images: Path, tmp_path: Path, tables: dict[str, Any]) -> None:
    folder = shutil.copytree(images, tmp_path / "images")
    rounds = {"update_rounds": 4, "samples_between_updates": 96, "max_batch_size": 8}
    model = {"config": VIT, "type": "image-classification"}
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
