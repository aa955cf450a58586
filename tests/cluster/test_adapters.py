"""Jobs that train an adapter on two workers: the bytes that travel, what is saved, and what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from hypha_ray.config import Job
from hypha_ray.config.schema import Model
from hypha_ray.data.catalogue import load
from hypha_ray.data.slices import read_slice
from hypha_ray.driver.attempts import records
from hypha_ray.driver.data_source import in_folder
from hypha_ray.errors import CheckpointError
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import layout_of
from hypha_ray.model.lora import sketch_trained
from hypha_ray.store.directory import RunDirectory
from tests.support.jobs import MODEL, job_of, run_job

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")

ROUNDS = {"update_rounds": 3, "samples_between_updates": 64, "max_batch_size": 4}
FAST = {"learning_rate": 1e-2}
MEAN = {"name": "average"}


@pytest.fixture(scope="module")
def results(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that has seen some of the corpus."""
    network = build_model(Model(config=MODEL), seed=1)
    manifest = load(corpus)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    for info in manifest.of("train")[:4]:
        for ids in torch.from_numpy(read_slice(corpus, info, manifest)["input_ids"]).long().split(10):
            optimizer.zero_grad()
            network(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    folder = tmp_path_factory.mktemp("base")
    network.save_pretrained(folder)
    return folder


def adapting(name: str, corpus: Path, base: Path, **tables: Any) -> Job:
    model = {"config": None, "repository": str(base), "lora": {"rank": 4}}
    return job_of(name, corpus, **{"model": model, "rounds": ROUNDS, **tables})


def adapter_bytes(job: Job) -> int:
    return layout_of(sketch_trained(job)).bytes()


def loss_on(dataset: Path, network: Any) -> float:
    """Mean loss over the validation split, as transformers has it: all samples have the same length."""
    manifest = load(dataset)
    parts = [read_slice(dataset, info, manifest)["input_ids"] for info in manifest.of("validation")]
    ids = torch.cat([torch.from_numpy(part) for part in parts]).long()
    with torch.no_grad():
        return float(network(input_ids=ids, labels=ids).loss)


def test_two_workers_exchange_commit_and_save_the_adapter_only(results: Path, corpus: Path, base: Path) -> None:
    rounds = {**ROUNDS, "update_rounds": 8}
    job = adapting("adapter", corpus, base, inner_optimizer=FAST, outer_optimizer=MEAN, rounds=rounds)
    run = run_job(job, results, corpus, export=True)
    size = adapter_bytes(job)
    assert 0 < size < 0.5 * sum(one.nbytes for one in load_file(base / "model.safetensors").values())
    assert [record["bytes_up"] for record in run.of_kind("round")] == [2 * size] * 8
    assert [record["bytes_down"] for record in run.of_kind("round")] == [2 * size] * 8
    newest = load_file(run.directory / "checkpoints" / "round_000007" / "model.safetensors")
    assert sum(array.nbytes for array in newest.values()) == size and all("lora_" in name for name in newest)
    logged = run.of_kind("eval")[-1]["val_loss"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(run.directory / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = loss_on(corpus, plain)
    by_peft = peft.PeftModel.from_pretrained(plain, run.directory / "model" / "adapter")
    assert logged < before - 0.01
    assert [loss_on(corpus, merged), loss_on(corpus, by_peft.eval())] == pytest.approx([logged] * 2, rel=1e-5)


STRATEGIES: dict[str, dict[str, Any]] = {
    "async": {"sync": {"strategy": "async"}, "rounds": {**ROUNDS, "update_rounds": 12}},
    "sync": {"sync": {"strategy": "sync"}, "rounds": {**ROUNDS, "update_rounds": 30, "samples_between_updates": 16}},
    "fragments": {"sync": {"fragments": 2, "codec": "int8", "downward_codec": "bf16"}},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_adapter_learns_by_every_strategy(name: str, results: Path, corpus: Path, base: Path) -> None:
    rates = {"inner_optimizer": FAST} if name == "sync" else {"inner_optimizer": FAST, "outer_optimizer": MEAN}
    run = run_job(adapting(name, corpus, base, **rates, **STRATEGIES[name]), results, corpus)
    before = loss_on(corpus, transformers.AutoModelForCausalLM.from_pretrained(base))
    losses = [record["val_loss"] for record in run.of_kind("eval")]
    assert np.mean(losses[len(losses) // 2 :]) < before - 0.005  # Single ones vary by 0.01 without a barrier.


def test_two_workers_learn_as_one_on_the_joined_batches(results: Path, corpus: Path, base: Path) -> None:
    size = {"update_rounds": 10, "samples_between_updates": 128}
    two = run_job(adapting("two", corpus, base, rounds={**size, "max_batch_size": 4}), results, corpus)
    alone = {
        "rounds": {**size, "max_batch_size": 8},
        "resources": {"num_workers": 1},
        "outer_optimizer": {"name": "average"},
    }
    one = run_job(adapting("one", corpus, base, **alone), results, corpus)
    found, expected = (run.of_kind("eval")[-1]["val_loss"] for run in (two, one))
    assert found <= 1.01 * expected


def test_run_goes_on_with_its_adapter_and_refuses_another_base(results: Path, corpus: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    build_model(Model(config=MODEL), seed=3).save_pretrained(base)
    run = run_job(adapting("again", corpus, base, rounds={**ROUNDS, "update_rounds": 1}), results, corpus)
    longer = adapting("again", corpus, base, rounds={**ROUNDS, "update_rounds": 2})
    list(records(longer, "again", RunDirectory(run.directory), in_folder(corpus)))
    first, second = run.commits()
    assert second["parent_sha256"] == first["theta_sha256"]
    build_model(Model(config=MODEL), seed=4).save_pretrained(base)
    with pytest.raises(CheckpointError, match="of another model than it builds now"):
        list(records(adapting("again", corpus, base), "again", RunDirectory(run.directory), in_folder(corpus)))
