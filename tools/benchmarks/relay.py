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

from benchmarks.throughput import ROUNDS, STEPS, TINY, WARM_UP_STEPS, flags, rounds_of
from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import read_slice
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.worker.bridged.process import job_definition

TURNS = 3
TRAINER = Path(__file__).parents[2] / "examples" / "torch_trainer.py"


def relay() -> dict[str, dict[str, Any]]:
    """Tokens/s of an external trainer between synchronisations ÷ those of the same one in a loop of its own."""
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = Path(scratch) / "corpus"
        prepare(PrepareOptions("stdlib", str(dataset), seq_len=128, max_samples=20_000), lambda kind, count: None)
        external = ("--bridge.commands", f'["{sys.executable} {TRAINER}"]')
        job = load(["@", str(TINY), *flags(dataset, workers=1), *external]).job
        ratios = []
        for turn in range(TURNS):
            alone = _alone(job, dataset)
            rounds = rounds_of(job, f"relay-{turn}", Path(scratch), dataset)
            in_job = mean(record["train_tokens_per_s"] for record in rounds)
            ratios.append(in_job / mean([alone, _alone(job, dataset)]))
    spread = {"min": round(min(ratios), 4), "max": round(max(ratios), 4)}
    conditions = {"turns": TURNS, "steps": STEPS, "model": "tiny.toml", "trainer": TRAINER.name}
    return {"bridge_relay": {"value": median(ratios), "target": ">= 0.97", **spread, **conditions}}


def _alone(job: Job, dataset: Path) -> float:
    """Tokens/s of the trainer without a job, in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"  # As Ray has it for the trainer of a worker with one CPU.
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_train, args=(theirs, job_definition(job, 0), dataset, job.rounds))
    process.start()
    tokens_per_s: float = ours.recv()
    process.join()
    return tokens_per_s


def _train(result: Connection, job_definition: dict[str, Any], dataset: Path, rounds: Any) -> None:
    import torch

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("torch_trainer", TRAINER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    local = module.Local(job_definition)
    manifest = load_manifest(dataset)
    arrays = read_slice(dataset, manifest.of("train")[0], manifest)
    size = rounds.max_batch_size
    rate = job_definition["inner_optimizer"]["learning_rate"]
    tokens = 0
    for step in range(-WARM_UP_STEPS, STEPS * (ROUNDS - 1)):
        if step == 0:
            began = time.perf_counter()
            tokens = 0
        start = step * size % (len(arrays["input_ids"]) - size)
        batch = {name: np.array(array[start : start + size]) for name, array in arrays.items()}
        local.step(batch, rate)
        tokens += batch["input_ids"].size
    result.send(tokens / (time.perf_counter() - began))
