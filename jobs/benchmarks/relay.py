"""An external trainer in a job against the same trainer alone: same model, batches and threads, in turn."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.throughput import ROUNDS, STEPS, TINY, WARM_UP_STEPS
from hypha_ray.config import Job
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.options import Options
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import read_slice
from hypha_ray.scheduler.cluster import connected
from hypha_ray.scheduler.launch import records
from hypha_ray.store.directory import RunDirectory
from hypha_ray.worker.outside import definition

TURNS = 3
TRAINER = Path(__file__).parents[2] / "examples" / "torch_trainer.py"


def relay() -> dict[str, dict[str, Any]]:
    """Tokens/s of an external trainer between synchronisations ÷ those of the same one in a loop of its own."""
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = Path(scratch) / "corpus"
        prepare(Options("stdlib", dataset, seq_len=128, max_samples=20_000), lambda what, count: None)
        job = load(["@", str(TINY), *_flags(dataset)]).job
        ratios = []
        for turn in range(TURNS):
            alone = _alone(job, dataset)
            directory = RunDirectory.create(Path(scratch), f"relay-{turn}", resolved_toml(job))
            found = [one for one in records(job, f"relay-{turn}", directory, dataset) if one["kind"] == "round"]
            ratios.append(mean(one["train_tokens_per_s"] for one in found[1:]) / mean([alone, _alone(job, dataset)]))
    spread = {"min": round(min(ratios), 4), "max": round(max(ratios), 4)}
    conditions = {"turns": TURNS, "steps": STEPS, "model": "tiny.toml", "trainer": TRAINER.name}
    return {"bridge_relay": {"value": median(ratios), "target": ">= 0.97", **spread, **conditions}}


def _flags(dataset: Path) -> list[str]:
    rounds = {"update_rounds": ROUNDS, "samples_between_updates": STEPS * 8, "evaluate_every": 0}
    flags = [part for name, value in rounds.items() for part in (f"--rounds.{name}", str(value))]
    command = f'["{sys.executable} {TRAINER}"]'
    workers = ("--resources.num_workers", "1", "--bridge.commands", command)
    return [*flags, *workers, "--dataset.path", str(dataset)]


def _alone(job: Job, dataset: Path) -> float:
    """Tokens/s of the trainer without a job, in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"  # As Ray has it for the trainer of a worker with one CPU.
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_train, args=(theirs, definition(job, 0), dataset, job.rounds))
    process.start()
    tokens_per_s: float = ours.recv()
    process.join()
    return tokens_per_s


def _train(result: Connection, told: dict[str, Any], dataset: Path, rounds: Any) -> None:
    import torch

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("torch_trainer", TRAINER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    local, manifest = module.Local(told), load_manifest(dataset)
    arrays = read_slice(dataset, manifest.of("train")[0], manifest)
    size, rate = rounds.max_batch_size, told["inner_optimizer"]["learning_rate"]
    tokens = 0
    for step in range(-WARM_UP_STEPS, STEPS * (ROUNDS - 1)):
        if step == 0:
            began, tokens = time.perf_counter(), 0
        start = step * size % (len(arrays["input_ids"]) - size)
        batch = {name: np.array(array[start : start + size]) for name, array in arrays.items()}
        local.step(batch, rate)
        tokens += batch["input_ids"].size
    result.send(tokens / (time.perf_counter() - began))
