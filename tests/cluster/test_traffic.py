"""Traffic and disk of a run are those that its summary foretells, and payloads take what they declare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.experimental import get_object_locations

from hypha_ray.codec import NAMES, codec, difference_codec, encoder, payload_bytes
from hypha_ray.codec.feedback import publish
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.earlier_runs import pace_of_earlier_run
from hypha_ray.driver.preflight.checks import case_of
from hypha_ray.driver.preflight.run_costs import disk_sizes, exchange_of
from hypha_ray.driver.preflight.summary import run_samples
from hypha_ray.model.layout import layout_of
from hypha_ray.types import Flat
from tests.support.jobs import job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")

EQUAL = {"dynamic_local_steps": False}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 0.0),
    "bf16": ({"codec": "bf16"}, 0.0),
    "int4": ({"codec": "int4", "downward_codec": "int8"}, 0.0),
    "topk": ({"codec": "topk", "fragments": 2, "downward_codec": "e3m0"}, 0.0),
    "together": ({"codec": "int8", "fragments": 2, "stagger": False}, 0.0),
    "gradients": ({"strategy": "sync", "codec": "bf16"}, 0.0),
    "huffman": ({"codec": "huffman3", "downward_codec": "huffman3"}, 0.15),
    "async": ({"strategy": "async"}, 0.25),
}
"""Tables of `[sync]`, and the largest relative error that their estimates may have."""
GROUPS = {"parameters/float32": 300_001, "buffers/int64": 3}
OVERHEAD = 2048
"""Bytes of names, shapes and dtypes of a payload's arrays, at most."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long(keep=2)
def test_bytes_of_a_run_are_those_of_its_summary(corpus: Path, tmp_path: Path, name: str) -> None:
    sync, tolerance = CASES[name]
    rounds = {"update_rounds": 6, "samples_between_updates": 16, "max_batch_size": 4, "evaluate_every": 0}
    job = job_of(name, corpus, sync=EQUAL | sync, rounds=rounds)
    case = case_of(job, in_folder(corpus))
    exchange = exchange_of(job, layout_of(case.modules, job.sync.fragments, job.sync.partition))
    records = run_job(job, tmp_path, corpus).of_kind("round")
    up = sum(record["bytes_up"] for record in records)
    down = sum(record["bytes_down"] for record in records)
    assert len(records) == 6
    assert exchange.is_exact == (not tolerance)
    assert (up, down) == (
        pytest.approx(exchange.total_up, rel=tolerance, abs=0),
        pytest.approx(exchange.total_down, rel=tolerance, abs=0),
    )
    if exchange.is_exact:
        assert {record["bytes_up"] for record in records} == set(exchange.up)
        assert sum(record["samples"] for record in records) == run_samples(job, in_folder(corpus).manifest)


@pytest.mark.parametrize(
    ("tables", "tolerance"),
    [
        ({"checkpoint": {"keep": 3, "best": True}}, 0.05),
        ({"outer_optimizer": {"name": "adam", "learning_rate": 1e-3}, "sync": {"downward_codec": "int8"}}, 0.05),
        ({"sync": {"strategy": "sync"}, "checkpoint": {"export_dtype": "bfloat16"}}, 0.05),
    ],
    ids=["best", "adam", "gradients"],
)
def test_disk_of_a_run_is_that_of_its_summary(
    corpus: Path, tmp_path: Path, tables: dict[str, dict[str, Any]], tolerance: float
) -> None:
    rounds = {"update_rounds": 5, "samples_between_updates": 16, "max_batch_size": 4}
    model = {"hidden_size": 128, "intermediate_size": 512}
    base = job_of("disk", corpus, rounds=rounds, **tables)
    config = {"config": {**(base.model.config or {}), **model}}
    job = base.model_copy(update={"model": base.model.model_copy(update=config)})
    case = case_of(job, in_folder(corpus))
    sizes = disk_sizes(case, layout_of(case.modules))
    folder = run_job(job, tmp_path, corpus, export=True).directory
    snapshots = sorted((folder / "checkpoints").iterdir())
    newest = sum(file.stat().st_size for file in snapshots[-1].glob("*.safetensors"))
    assert newest == pytest.approx(sizes.snapshot, rel=tolerance)
    assert len(snapshots) <= sizes.snapshots <= len(snapshots) + job.checkpoint.best
    model_bytes = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    assert model_bytes == pytest.approx(sizes.model, rel=tolerance)
    assert len(list(folder.glob("model*/"))) == sizes.models


def test_a_run_shows_the_pace_of_the_next_one(corpus: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {"rounds": {"update_rounds": 3, "samples_between_updates": 16, "max_batch_size": 4}}
    first = job_of("first", corpus, run={"dir": str(tmp_path)}, **tables)
    outcome = run_job(first, tmp_path, corpus)
    (outcome.directory / "dataset.json").write_text(
        f'{{"sha256": "{in_folder(corpus).manifest.identity}", "datasets": []}}'
    )
    second = job_of("second", corpus, run={"dir": str(tmp_path)}, **tables)
    pace = pace_of_earlier_run(second, in_folder(corpus).manifest)
    assert pace is not None and (pace.run, pace.rounds) == ("first", 2)
    elapsed_s = [record["elapsed_s"] for record in outcome.of_kind("round")]
    assert pace.round_s == pytest.approx((elapsed_s[2] - elapsed_s[0]) / 2)


def in_store(payload: Flat) -> int:
    """Size of the object that a payload is put as."""
    reference = ray.put(payload)
    size: int = get_object_locations([reference])[reference]["object_size"]
    return size


def flat(seed: int) -> Flat:
    random = np.random.default_rng(seed)
    return {"parameters/float32": random.standard_normal(GROUPS["parameters/float32"]).astype(np.float32)}


@pytest.mark.parametrize("name", NAMES)
def test_payload_takes_the_bytes_that_it_declares(name: str) -> None:
    payload, _ = encoder(name, 1.0).encode({**flat(1), "buffers/int64": np.arange(3)}, flat(0))
    form = codec(name).form(GROUPS)
    most = sum(np.dtype(array.dtype).itemsize * array.size for array in form.values())
    declared = payload_bytes(payload)
    assert declared == most if all(array.exact for array in form.values()) else declared <= most
    assert declared <= in_store(payload) <= declared + OVERHEAD


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp32"])
def test_difference_takes_the_bytes_that_it_declares(name: str) -> None:
    found = difference_codec(name)
    assert found is not None
    payload, _ = publish(found, 1.0, flat(0), flat(1), {})
    assert payload_bytes(payload) <= in_store(payload) <= payload_bytes(payload) + OVERHEAD
