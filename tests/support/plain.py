"""The same training in one process, by hand: what whole jobs are held against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file

from hypha_ray.config import Job
from hypha_ray.data.catalogue import load
from hypha_ray.data.slices import read_slice
from hypha_ray.model.lora import build_trained
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.types import Span
from hypha_ray.worker.incarnation import epoch_order
from tests.support.jobs import Outcome

Batch = dict[str, npt.NDArray[np.generic]]


def samples_of(dataset: Path, spans: Sequence[Span], seed: int = 0) -> Batch:
    """Samples of spans, in the order in which workers see them."""
    manifest = load(dataset)
    infos = {info.index: info for info in manifest.slices}
    parts = []
    for span in spans:
        arrays = read_slice(dataset, infos[span.slice], manifest)
        rows = epoch_order(seed, span.epoch, span.slice, len(next(iter(arrays.values()))))[span.start : span.stop]
        parts.append({name: array[rows] for name, array in arrays.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def joined_batches(run: Outcome, dataset: Path) -> list[Batch]:
    """What each round was trained on, by all workers together."""
    rounds = run.spans()
    return [samples_of(dataset, [span for worker in sorted(spans) for span in spans[worker]]) for spans in rounds]


def train_plainly(job: Job, batches: Sequence[Batch]) -> dict[str, npt.NDArray[np.float32]]:
    """One step on each batch; the trained weights, by name."""
    torch.set_num_threads(1)
    model = build_trained(job).train()
    optimizer = build_optimizer(model, job.inner_optimizer, len(batches))
    for batch in batches:
        optimizer.zero_grad()
        model(**_inputs(batch)).loss.backward()
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def _inputs(batch: Batch) -> dict[str, torch.Tensor]:
    if "images" in batch:
        return {
            "pixel_values": torch.from_numpy(batch["images"]),
            "labels": torch.from_numpy(batch["labels"].astype(np.int64)),
        }
    ids = torch.from_numpy(batch["input_ids"].astype(np.int64))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def final_weights(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    """What the newest snapshot of a run has."""
    newest = sorted((directory / "checkpoints").glob("round_*"))[-1]
    return load_file(newest / "model.safetensors")


def furthest(one: dict[str, npt.NDArray[np.float32]], other: dict[str, npt.NDArray[np.float32]]) -> float:
    """The greatest difference between two models' weights."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)
