"""The memory that a dry run foretells is what a process takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.schema import Job, Model
from hypha_ray.driver.preflight.memory import StepSizes, step_memory
from hypha_ray.model.build import build_model, skeleton, task_of
from hypha_ray.types import Samples

ROOT = Path(__file__).parents[3]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 6000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
SHARDED = {"worker": {"device": "cpu", "processes": 2, "sharding": "full"}}
Measured = tuple[dict[str, Any], Any]
"""Tables of a job, and bytes of its process, or of each of its processes."""
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "checkpointed": {"worker": {"gradient_checkpointing": True}},
    "fused": {"worker": {"fused_loss": True}},
    "accumulated": {"rounds": {"max_batch_size": 8, "accumulation": 8}},
    "synchronous": {"rounds": {"max_batch_size": 8, "accumulation": 8}, "sync": {"strategy": "sync"}},
    "adapter": {"model": {"lora": {"rank": 4}}},
    "adamw8bit": {"inner_optimizer": {"name": "adamw8bit"}},
}
STEPS = """
import json, os, re, sys
from pathlib import Path
import numpy as np
import torch
import transformers.models.llama.modeling_llama
from hypha_ray.config.schema import Job
from hypha_ray.types import Samples
from hypha_ray.worker.supervised import SupervisedTrainer
from hypha_ray.worker.trainer import strategy
from tests.support.followers import sharded

def memory(pid, name):
    return 1024 * int(re.search(name + r":\\s*(\\d+)", Path(f"/proc/{pid}/status").read_text())[1])

def steps(tables, trainer, rows, tokens):
    samples = Samples({"input_ids": np.full((rows, tokens), 5)}, np.zeros((rows, 3), np.int64))
    for _ in range(2):
        strategy(Job.model_validate(tables), trainer).begin_step(samples)

def taken(small, tables):
    steps(small, SupervisedTrainer(Job.model_validate(small)), 1, 8)
    before = memory("self", "VmRSS")
    steps(tables, SupervisedTrainer(Job.model_validate(tables)), 8, 256)
    return memory("self", "VmHWM") - before

def of_processes(tables, tokens, name):
    with sharded(Job.model_validate(tables)) as trainer:
        pids = [os.getpid(), *(child.pid for child in trainer._team.children)]
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # Each has built the model as a whole before.
        steps(tables, trainer, 8, tokens)
        trainer._team.replies()
        return [memory(pid, name) for pid in pids]

def taken_with_shards(small, tables):
    before = of_processes(small, 8, "VmRSS")
    before[0] = memory("self", "VmRSS")
    return [high - low for high, low in zip(of_processes(tables, 256, "VmHWM"), before)]

torch.set_num_threads(1)
for name, (small, tables) in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        measure = taken_with_shards if tables.get("worker", {}).get("sharding") else taken
        print(json.dumps({name: measure(small, tables)}), flush=True)
        os._exit(0)
    os.wait()
"""
"""Prints a line for each job, which a fork with the libraries has trained."""


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    """For each kind that is tested, and for shards, the job and the bytes that two steps take beside libraries."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    kinds = {item.callspec.params.get("kind") for item in functions if hasattr(item, "callspec")}
    folder = tmp_path_factory.mktemp("base")
    build_model(Model(config=LLAMA), seed=0).save_pretrained(folder)
    small = {**LLAMA, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    jobs: dict[str, list[dict[str, Any]]] = {}
    for kind, own in {**KINDS, "shards": SHARDED}.items():
        tables = {"model": {"config": LLAMA}, "rounds": {"max_batch_size": 8}, **own}
        if kind == "adapter":
            tables["model"] = {"repository": str(folder), **tables["model"]}
        is_installed = kind != "adamw8bit" or find_spec("bitsandbytes") is not None
        if kind in {*kinds, "shards"} and is_installed:
            jobs[kind] = [{**tables, "model": {"config": small}}, tables]
    # Freed memory goes back at once.
    variables = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STEPS, json.dumps(jobs)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    taken: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        taken |= json.loads(line)
    assert taken.keys() == jobs.keys(), done.stderr
    return {kind: (tables, taken[kind]) for kind, (_, tables) in jobs.items()}


def foretold(tables: dict[str, Any], processes: int = 1) -> StepSizes:
    job = Job.model_validate(tables)
    samples = Samples({"input_ids": np.full((3, 256), 5)}, np.zeros((3, 3), np.int64))
    found = step_memory(job, task_of(job.model, skeleton(job.model)), samples, processes)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long(keep=1)
def test_memory_of_a_step_is_foretold_within_15_percent(kind: str, measured: dict[str, Measured]) -> None:
    if kind == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="it is an extra")
    tables, taken = measured[kind]
    assert foretold(tables).total == pytest.approx(taken, rel=0.15)


@pytest.mark.slow
def test_compiled_step_takes_at_most_that_of_a_fused_loss_and_logits_of_16_bits() -> None:
    """8 × 256 logits of 6 000 tokens and their gradients; those of 32 bits are never there."""
    tables: dict[str, Any] = {"model": {"config": LLAMA}, "rounds": {"max_batch_size": 8}}
    given = {"autocast": "bf16", "attention": "none"}
    fused, plain, compiled = (
        foretold({**tables, "worker": {**given, "fused_loss": fuses, "compile": compiles}})
        for fuses, compiles in ((True, False), (False, False), (False, True))
    )
    assert compiled.activations == fused.activations + 2 * 8 * 256 * LLAMA["vocab_size"] * 2
    assert compiled.total < plain.total
    assert compiled.note(1).startswith("a training step of a worker takes at most 0.")
    assert plain.note(1).startswith("a training step of a worker takes 0.")


@pytest.mark.slow
def test_memory_of_each_process_with_shards_is_foretold_within_15_percent(measured: dict[str, Measured]) -> None:
    tables, taken = measured["shards"]
    found = foretold(tables, 2)
    assert taken == pytest.approx([found.total] * 2, rel=0.15)
    assert found.of_worker(2) == 2 * found.total and " in each (weights 12 MiB" in found.note(2)
    assert found.note(2).endswith("which builds a model of 25 MiB first")


@pytest.mark.slow
def test_shards_of_more_processes_are_smaller_and_embeddings_are_gathered_by_all() -> None:
    """Weights outside of blocks are there three times at the end of a backward pass: with gradients and their sums."""
    embedding = 6000 * 256 * 4
    whole = foretold({"model": {"config": LLAMA}, "rounds": {"max_batch_size": 1}})
    for processes in (2, 4, 16):
        worker = {"processes": processes, "sharding": "full"}
        tables = {"model": {"config": LLAMA}, "worker": worker, "rounds": {"max_batch_size": processes}}
        found = foretold(tables, processes)
        parts = [whole.weights / processes, whole.optimizer / processes]
        assert [found.weights, found.optimizer] == pytest.approx(parts, rel=0.01)
        assert found.activations > 3 * 2 * embedding and found.whole_model == whole.weights


@pytest.mark.slow
def test_8bit_adamw_saves_three_quarters_of_the_averages_and_no_activations() -> None:
    base: dict[str, Any] = {"model": {"config": LLAMA}, "rounds": {"max_batch_size": 8}}
    whole, narrow = foretold(base), foretold({**base, "inner_optimizer": {"name": "adamw8bit"}})
    assert (narrow.weights, narrow.activations) == (whole.weights, whole.activations)
    assert 0.25 * whole.optimizer < narrow.optimizer < 0.27 * whole.optimizer


@pytest.mark.slow
def test_accumulation_adapters_and_checkpointing_save_memory(tmp_path: Path) -> None:
    base: dict[str, Any] = {"model": {"config": LLAMA}, "rounds": {"max_batch_size": 8}}
    whole = foretold(base).total
    assert foretold({**base, "rounds": {"max_batch_size": 8, "accumulation": 4}}).total < 0.5 * whole
    assert foretold({**base, "worker": {"gradient_checkpointing": True}}).total < 0.8 * whole


@pytest.mark.slow
def test_weights_of_16_bits_halve_weights_gradients_and_running_averages() -> None:
    whole = foretold({"model": {"config": LLAMA}, "rounds": {"max_batch_size": 1}})
    narrow = {"model": {"config": {**LLAMA, "dtype": "bfloat16"}}, "inner_optimizer": {"stochastic_rounding": True}}
    half = foretold({**narrow, "rounds": {"max_batch_size": 1}})
    assert [half.weights, half.optimizer] == pytest.approx([whole.weights / 2, whole.optimizer / 2], rel=1e-3)
    assert half.total < whole.total


@pytest.mark.slow
def test_processes_have_a_part_of_the_batch_each_and_one_optimizer() -> None:
    base: dict[str, Any] = {"model": {"config": LLAMA}}
    two = foretold({**base, "rounds": {"max_batch_size": 8}}, processes=2)
    half = foretold({**base, "rounds": {"max_batch_size": 4}})
    assert two == half and two.of_worker(1) == half.total
    assert two.of_worker(2) == 2 * (half.weights + half.activations) + half.optimizer
    assert two.note(2).startswith("a training step of a worker's 2 processes takes ")


def test_model_that_branches_on_values_has_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    network = type(skeleton(Model(config=LLAMA)))
    forward = network.forward

    def branching(self: Any, input_ids: Any, **others: Any) -> Any:
        return forward(self, input_ids=input_ids[: int(input_ids.max())], **others)

    monkeypatch.setattr(network, "forward", branching)
    job = Job.model_validate({"model": {"config": LLAMA}})
    samples = Samples({"input_ids": np.full((3, 256), 5)}, np.zeros((3, 3), np.int64))
    assert step_memory(job, task_of(job.model, skeleton(job.model)), samples) is None


def test_operation_without_known_shapes_leaves_the_estimate_out_and_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        torch.ops.aten.mm(torch.empty(2, 3), torch.empty(4, 5))

    monkeypatch.setattr("hypha_ray.driver.preflight.memory.training_losses", fail)
    job = Job.model_validate({"model": {"config": {**LLAMA, "num_hidden_layers": 1}}, "rounds": {"max_batch_size": 1}})
    samples = Samples({"input_ids": np.full((1, 8), 5)}, np.zeros((1, 3), np.int64))
    assert step_memory(job, task_of(job.model, skeleton(job.model)), samples, 1) is None
    assert capfd.readouterr().err == ""
