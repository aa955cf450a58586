"""The inner loop against bare PyTorch, on the same Ray, model, batches and threads, in turn."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch

from hypha_ray.config import Job
from hypha_ray.config.load import load, resolved_toml
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.options import Options
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import read_slice
from hypha_ray.driver.launch import records
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.model.loading.build import build_model
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.store.directory import RunDirectory

TURNS = 3
ROUNDS = 3
STEPS = 150
"""Inner steps of a worker in a round. The first round warms up and isn't counted."""
WARM_UP_STEPS = 20
"""Steps of a bare loop that aren't counted."""
TINY = Path(__file__).parent.parent / "configs" / "tiny.toml"


class BareLoop:
    """What a user without us would write: a model, an optimizer, batches in memory, no reports."""

    def __init__(self, job: Job, batches: npt.NDArray[np.int64]) -> None:
        torch.set_num_threads(1)
        self._model = build_model(job.model, job.run.seed).train()
        self._optimizer = build_optimizer(self._model, job.inner_optimizer, 10_000)
        self._batches = [torch.from_numpy(np.array(batch)) for batch in batches]

    def tokens_per_s(self, steps: int) -> float:
        """Train, and say how fast; the first steps warm up and don't count."""
        for step in range(-WARM_UP_STEPS, steps):
            if step == 0:
                began = time.perf_counter()
            ids = self._batches[step % len(self._batches)]
            self._optimizer.zero_grad()
            self._model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
            self._optimizer.step()
        return steps * self._batches[0].numel() / (time.perf_counter() - began)


def inner_loop() -> dict[str, dict[str, Any]]:
    """Tokens/s of a job's two workers between synchronisations ÷ those of two bare loops; waits for data on the way."""
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = Path(scratch) / "corpus"
        prepare(Options("stdlib", dataset, seq_len=128, max_samples=20_000), lambda what, count: None)
        job = load(["@", str(TINY), *flags(dataset, workers=2)]).job
        batches = _batches(dataset, job.rounds.max_batch_size)
        bare = [ray.remote(num_cpus=0)(BareLoop).remote(job, batches) for _ in range(2)]
        plain, trained, waits = [_plain(bare)], [], []
        for turn in range(TURNS):
            rounds = rounds_of(job, f"bench-{turn}", Path(scratch), dataset)
            trained.append(mean(record["train_tokens_per_s"] for record in rounds))
            waits.append(mean(record["data_wait_fraction"] for record in rounds))
            plain.append(_plain(bare))
    # Against the bare loops before and after it, so that a machine that grows slower or faster counts for neither.
    ratios = [2 * ours / (before + after) for ours, before, after in zip(trained, plain, plain[1:], strict=False)]
    conditions = {
        "workers": 2,
        "threads": 1,
        "turns": TURNS,
        "rounds": ROUNDS - 1,
        "steps": STEPS,
        "model": "tiny.toml",
    }
    spread = {"min": round(min(ratios), 4), "max": round(max(ratios), 4)}
    return {
        "inner_overhead": {"value": median(ratios), "target": ">= 0.97", **spread, **conditions},
        "data_wait_fraction": {"value": median(waits), "target": "<= 0.01", **conditions},
    }


def _plain(bare: list[Any]) -> float:
    """Tokens/s of all bare loops at once."""
    return float(sum(ray.get([loop.tokens_per_s.remote(STEPS * (ROUNDS - 1)) for loop in bare])))


def flags(dataset: Path, workers: int) -> list[str]:
    """Flags of a job whose workers make `STEPS` steps a round."""
    rounds = {"update_rounds": ROUNDS, "samples_between_updates": workers * STEPS * 8, "evaluate_every": 0}
    sizes = [part for name, value in rounds.items() for part in (f"--rounds.{name}", str(value))]
    return [*sizes, "--resources.num_workers", str(workers), "--dataset.path", str(dataset)]


def _batches(dataset: Path, size: int) -> npt.NDArray[np.int64]:
    """One slice in memory, as batches: int64 [batches, size, seq_len]."""
    manifest = load_manifest(dataset)
    ids = read_slice(dataset, manifest.of("train")[0], manifest)["input_ids"].astype(np.int64)
    return ids[: len(ids) // size * size].reshape(-1, size, ids.shape[1])


def rounds_of(job: Job, name: str, parent: Path, dataset: Path) -> list[dict[str, Any]]:
    """Run the job; its round records after the first."""
    directory = RunDirectory.create(parent, name, resolved_toml(job))
    found = [record for record in records(job, name, directory, dataset) if record["kind"] == "round"]
    return found[1:]
