"""The inner loop against bare PyTorch, on the same Ray, model, batches and threads, in turn."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch

from benchmarks.usage import WORKER, Usage
from hypha_ray.config import Job
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import read_slice
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.launch import records
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.model.lora import build_trained
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.store.directory import RunDirectory

TURNS = 3
ROUNDS = 4
STEPS = 150
"""Inner steps of a worker in a round. The first round warms up and isn't counted."""
WARM_UP_STEPS = 20
"""Steps of a bare loop that aren't counted."""
TINY = Path(__file__).parents[2] / "jobs" / "configs" / "tiny.toml"


class BareLoop:
    """Plain PyTorch: a model, an optimizer, batches in memory, no reports."""

    def __init__(self, job: Job, batches: npt.NDArray[np.int64]) -> None:
        torch.set_num_threads(1)
        self._model = build_trained(job).train()
        self._optimizer = build_optimizer(self._model, job.inner_optimizer, 10_000)
        self._batches = [torch.from_numpy(np.array(batch)) for batch in batches]

    def train(self, steps: int) -> tuple[float, float]:
        """Train; return tokens/s and CPU seconds of a step. The first steps warm up and don't count."""
        for step in range(-WARM_UP_STEPS, steps):
            if step == 0:
                began = time.perf_counter()
                worked = time.thread_time()
            ids = self._batches[step % len(self._batches)]
            self._optimizer.zero_grad()
            output = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            output.loss.backward()
            self._optimizer.step()
        tokens = steps * self._batches[0].numel()
        return tokens / (time.perf_counter() - began), (time.thread_time() - worked) / steps


def inner_loop() -> dict[str, dict[str, Any]]:
    """Tokens/s of a job's two workers between synchronisations ÷ those of two bare loops, and where the rest goes."""
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = Path(scratch) / "corpus"
        options = PrepareOptions("stdlib", str(dataset), seq_len=128, max_samples=20_000)
        prepare(options, lambda kind, count: None)
        job = load(["@", str(TINY), *flags(dataset, workers=2)]).job
        batches = _batches(dataset, job.rounds.max_batch_size)
        plain = [_plain(job, batches)]
        turns = []
        for turn in range(TURNS):
            turns.append(_turn(job, f"bench-{turn}", Path(scratch), dataset))
            plain.append(_plain(job, batches))
    # Against the bare loops before and after it, so that a machine that grows slower or faster counts for neither.
    speeds = []
    loops = []
    for turn_figures, (before, after) in zip(turns, pairwise(plain), strict=True):
        plain_speed, plain_step_s = np.add(before, after) / 2
        speeds.append(turn_figures["tokens_per_s"] / plain_speed)
        loops.append(plain_step_s / turn_figures["loop_s"])
    conditions = {
        "workers": 2,
        "threads": 1,
        "turns": TURNS,
        "rounds": ROUNDS - 1,
        "steps": STEPS,
        "model": "tiny.toml",
    }
    parts = {}
    for name in ("loop_s", "outside_training"):
        parts[name] = round(median(figures[name] for figures in turns), 5)
    cores = {}
    for name in turns[-1]["cores"]:
        cores[name] = round(median(figures["cores"][name] for figures in turns), 4)
    other_cores = round(sum(cores.values()) - cores[WORKER], 4)
    busy = {"other_cores": other_cores, "cores": cores}
    waits = median(figures["waits"] for figures in turns)
    return {
        "inner_overhead": {"value": median(speeds), "target": ">= 0.97", **_spread(speeds), **conditions, **busy},
        "inner_loop_cpu": {"value": median(loops), "target": ">= 0.99", **_spread(loops), **conditions, **parts},
        "data_wait_fraction": {"value": waits, "target": "<= 0.01", **conditions},
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"min": round(min(values), 4), "max": round(max(values), 4)}


def _turn(job: Job, name: str, parent: Path, dataset: Path) -> dict[str, Any]:
    """Run the job once.

    Returns:
        Figures of workers: tokens/s while they train, the fraction of that time spent waiting for data, and the
        fraction of a round outside training. Of the rounds between first and last: CPU seconds of a step in the
        training thread, and busy cores by kind of process.

    """
    usage: list[Usage] = []
    rounds = rounds_of(job, name, parent, dataset, lambda record: usage.append(Usage.now()))
    steps = sum(sum(record["batches"].values()) for record in rounds[:-1])
    return {
        "tokens_per_s": mean(record["train_tokens_per_s"] for record in rounds),
        "waits": mean(record["data_wait_fraction"] for record in rounds),
        "outside_training": mean(record["idle_fraction"] for record in rounds),
        "loop_s": usage[-2].loop_s(usage[0]) / steps,
        "cores": usage[-2].cores(usage[0]),
    }


def _plain(job: Job, batches: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Tokens/s of all bare loops at once, and CPU seconds of a step of theirs.

    They end with that: an actor with nothing to do wakes up a hundred times a second, at 0.6 % of a core.
    """
    loop_class: Any = ray.remote(num_cpus=0)(BareLoop)
    loops = [loop_class.remote(job, batches) for _ in range(2)]
    steps = STEPS * (ROUNDS - 1)
    results = ray.get([loop.train.remote(steps) for loop in loops])
    for loop in loops:
        ray.kill(loop)
    speeds, step_s = zip(*results, strict=True)
    return sum(speeds), mean(step_s)


def flags(dataset: Path, workers: int) -> list[str]:
    """Flags of a job whose workers make `STEPS` steps a round."""
    rounds = {"update_rounds": ROUNDS, "samples_between_updates": workers * STEPS * 8, "evaluate_every": 0}
    sizes: list[str] = []
    for name, value in rounds.items():
        sizes += [f"--rounds.{name}", str(value)]
    return [*sizes, "--resources.num_workers", str(workers), "--dataset.path", str(dataset)]


def _batches(dataset: Path, size: int) -> npt.NDArray[np.int64]:
    """One slice in memory, as batches: int64 [batches, size, seq_len]."""
    manifest = load_manifest(dataset)
    arrays = read_slice(dataset, manifest.of("train")[0], manifest)
    ids = arrays["input_ids"].astype(np.int64)
    whole = len(ids) // size * size
    return ids[:whole].reshape(-1, size, ids.shape[1])


def rounds_of(
    job: Job, name: str, parent: Path, dataset: Path, on_round: Callable[[dict[str, Any]], None] = lambda record: None
) -> list[dict[str, Any]]:
    """Run the job; returns its round records after the first one. `on_round` is called with each one when it comes."""
    directory = RunDirectory.create(parent, name, resolved_toml(job))
    rounds = []
    for record in records(job, name, directory, in_folder(dataset)):
        if record["kind"] == "round":
            on_round(record)
            rounds.append(record)
    return rounds[1:]
