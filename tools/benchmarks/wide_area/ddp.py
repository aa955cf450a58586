"""Training of a job's model and data by Ray Train's TorchTrainer, DistributedDataParallel and gloo.

    python tools/benchmarks/wide_area/ddp.py JOB.toml CURVE.jsonl EVERY STEPS TARGET

Same model, seed, batch per worker, inner optimizer and validation as the job; gradients are averaged in every step. It
evaluates every EVERY steps, and ends at TARGET or after STEPS. CURVE gets a line for each evaluation.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from hypha_ray.config.load import load
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.slices import read_slice
from hypha_ray.model.build import task_of
from hypha_ray.model.lora import build_trained
from hypha_ray.model.losses import loss_of
from hypha_ray.model.metrics import evaluate
from hypha_ray.optim.optimizers import build_optimizer


def train(config: dict[str, Any]) -> None:
    """Train in one of Ray Train's workers."""
    torch.set_num_threads(1)
    job = load(["@", config["job"]]).job
    rank = torch.distributed.get_rank()
    workers = torch.distributed.get_world_size()
    model = build_trained(job).train()
    task = task_of(job.model, model)
    optimizer = build_optimizer(model, job.inner_optimizer, config["steps"])
    parallel = prepare_model(model, move_to_device=False)
    folder = Path(str(job.dataset.path))
    size = job.rounds.max_batch_size
    held_out = list(_batches(_samples(folder, "validation")[rank::workers], size))
    samples = _samples(folder, "train")
    order = np.random.default_rng(job.run.seed).permutation(len(samples))[rank::workers]
    torch.distributed.barrier()
    began = time.monotonic()
    for step, batch in enumerate(_batches(samples[order], size), 1):
        optimizer.zero_grad()
        loss_of(parallel(**task.inputs(batch, None))).backward()
        optimizer.step()
        if step % config["every"] == 0:
            metric_sums = evaluate(model, task, held_out, "cpu")
            sums = torch.tensor(metric_sums["val_loss"], dtype=torch.float64)
            torch.distributed.all_reduce(sums)
            loss = float(sums[0] / sums[1])
            if rank == 0:
                _write(Path(config["curve"]), time.monotonic() - began, step, loss)
            if loss <= config["target"] or step >= config["steps"]:
                break
    ray.train.report({"steps": step})


def _samples(folder: Path, split: str) -> Any:
    """Token ids of a split: int64 [samples, seq_len]."""
    manifest = load_manifest(folder)
    return np.concatenate([read_slice(folder, info, manifest)["input_ids"] for info in manifest.of(split)])


def _batches(samples: Any, size: int) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(samples) - size + 1, size):
        yield {"input_ids": torch.from_numpy(samples[start : start + size].astype(np.int64))}


def _write(curve: Path, elapsed_s: float, step: int, loss: float) -> None:
    with curve.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"elapsed_s": elapsed_s, "step": step, "val_loss": loss}) + "\n")


def main() -> None:
    """Start Ray Train in the cluster that RAY_ADDRESS names."""
    file, curve, every, steps, target = sys.argv[1:]
    config = {"job": file, "curve": curve, "every": int(every), "steps": int(steps), "target": float(target)}
    workers = load(["@", file]).job.num_workers
    ray.init(log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="ddp", storage_path=str(Path(curve).parent / "train")),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()


if __name__ == "__main__":
    main()
