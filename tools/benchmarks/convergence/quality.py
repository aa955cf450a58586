"""Validation loss at a hundredth of the traffic: DiLoCo beside synchronous AdamW, MuLoCo beside synchronous Muon.

All train the same model on the same number of tokens, and one worker alone on its quarter of them. A synchronous run is
one worker with the joined batches of all four, which computes what they would together (`tests/cluster` has a test
of that). Its traffic is computed: gradients up and weights down in fp32.

Of the data that is held out, one half chooses learning rates, for each side its own, and the other half is reported:

    python jobs/bench.py --only quality quality_muon
    PYTHONPATH=tools python -m benchmarks.convergence.quality    # try all of `GRIDS` again, on the half that chooses
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hypha_ray.config import Job
from hypha_ray.config.load import resolved_toml
from hypha_ray.data.manifest import read_manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import read_slice
from hypha_ray.driver.data_source import in_folder
from hypha_ray.driver.launch import finish, records
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.model.build import task_of
from hypha_ray.model.metrics import evaluate
from hypha_ray.store.directory import RunDirectory

WORKERS = 4
BATCH = 8
SEQ_LEN = 64
STEPS = 4800
SEEDS = (1, 2, 3)
TUNING_SEEDS = (0,)
WARMUP = 0.2
"""Part of the steps in which the learning rate rises."""
HELD_OUT = 16_384
FOUR_BITS = ("int4", "int4")
HUFFMAN = ("huffman2", "huffman3")
"""Codecs, up and down. What is lost upward is averaged over the workers, so it may be more."""
_MODEL = {
    "model_type": "gpt2",
    "vocab_size": 384,
    "n_positions": SEQ_LEN,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "tie_word_embeddings": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FLOORS = (0.0, 0.1)
CHOSEN = {"synchronous": 1, "diloco": 2, "alone": 1, "synchronous_muon": 4, "muloco": 1, "alone_muon": 1}
"""Places in the grids."""


@dataclass(frozen=True)
class Side:
    """Settings of a run: `steps` of each worker in a round and in all, and tables of its job file."""

    workers: int
    batch: int
    steps: int
    tables: dict[str, dict[str, Any]]
    total: int = STEPS

    def job(self, name: str, seed: int, dataset: Path) -> Job:
        """The job of a run."""
        rounds = -(-self.total // self.steps)
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": name, "seed": seed},
            "model": {"config": _MODEL},
            "dataset": {"path": str(dataset)},
            "rounds": {
                "update_rounds": rounds,
                "samples_between_updates": self.workers * self.steps * self.batch,
                "max_batch_size": self.batch,
                "evaluate_every": 0,
                **self.tables.get("rounds", {}),
            },
            "inner_optimizer": {
                "schedule": "cosine-with-warmup",
                "warmup_steps": round(WARMUP * rounds * self.steps),
                **self.tables["inner_optimizer"],
            },
            "outer_optimizer": self.tables["outer_optimizer"],
            "sync": {"dynamic_local_steps": False, **self.tables.get("sync", {})},
            "resources": {"num_workers": self.workers, "min_workers": self.workers, "worker": {"cpu": 0.5}},
            "checkpoint": {"every_rounds": rounds, "keep": 1},
            "telemetry": {"sinks": ["jsonl"]},
        }
        return Job.model_validate(tables)


def _plain(batch: int, **inner: Any) -> Side:
    return Side(1, batch, 40, {"inner_optimizer": inner, "outer_optimizer": {"name": "average"}})


def diloco(steps: int, eta: float, mu: float, codecs: tuple[str, str] = FOUR_BITS, **inner: Any) -> Side:
    """Codes both ways, with error feedback."""
    tables = {
        "inner_optimizer": {"k_aware": True, **inner},
        "outer_optimizer": {"learning_rate": eta, "momentum": mu},
        "sync": dict(zip(("codec", "downward_codec"), codecs, strict=True)),
    }
    return Side(WORKERS, BATCH, steps, tables)


def _adamw(rate: float, floor: float = 0.0) -> dict[str, Any]:
    return {"learning_rate": rate, "min_lr_rate": floor}


def _muon(rate: float, adamw: float, floor: float = 0.0) -> dict[str, Any]:
    return {"name": "muon", "muon_learning_rate": rate, "learning_rate": adamw, "min_lr_rate": floor}


GRIDS: dict[str, list[Side]] = {
    "synchronous": [_plain(WORKERS * BATCH, **_adamw(rate)) for rate in (8e-3, 16e-3, 24e-3)],
    "diloco": [diloco(13, 0.7, 0.8, **_adamw(*rates)) for rates in product((4e-3, 6e-3), FLOORS)],
    "alone": [_plain(BATCH, **_adamw(rate)) for rate in (4e-3, 8e-3, 16e-3)],
    "synchronous_muon": [
        *(_plain(WORKERS * BATCH, **_muon(rate, 8e-3)) for rate in (5e-3, 1e-2, 2e-2)),
        *(_plain(WORKERS * BATCH, **_muon(1e-2, adamw)) for adamw in (5e-3, 12e-3, 18e-3)),
        _plain(WORKERS * BATCH, **_muon(2e-2, 8e-3, 0.1)),
    ],
    "muloco": [
        *(diloco(17, 0.7, 0.6, HUFFMAN, **_muon(2e-2, adamw)) for adamw in (3e-3, 5e-3, 8e-3)),
        diloco(17, 0.7, 0.6, HUFFMAN, **_muon(1e-2, 8e-3)),
        diloco(17, 0.9, 0.5, HUFFMAN, **_muon(2e-2, 5e-3)),
    ],
    "alone_muon": [
        *(_plain(BATCH, **_muon(1e-2, adamw)) for adamw in (4e-3, 8e-3, 12e-3)),
        _plain(BATCH, **_muon(5e-3, 4e-3)),
    ],
}
"""Settings that may be tried: learning rates, the part of them at which the cosine ends, MuLoCo's outer step."""


class Kind(NamedTuple):
    """Names of the runs that are compared, and how much less than synchronous training `rare` has to send."""

    synchronous: str
    rare: str
    alone: str
    least: int


KINDS = {
    "quality": Kind("synchronous", "diloco", "alone", 100),
    "quality_muon": Kind("synchronous_muon", "muloco", "alone_muon", 240),
}
"""By the rows that show them."""


class Outcome(NamedTuple):
    """Losses of a run on both halves of what was held out, and the bytes that all its workers have sent and got.

    Attributes:
        steps: of each worker.

    """

    choosing: float
    reported: float
    bytes: int
    parameters: int
    steps: int

    @property
    def traffic(self) -> float:
        """Bytes of gradients up and weights down in fp32, of all workers in all steps, over those that were moved."""
        return WORKERS * self.steps * 2 * 4 * self.parameters / self.bytes


def quality(row: str) -> dict[str, dict[str, Any]]:
    """Losses of a kind, over those of its synchronous training: means over seeds."""
    kind = KINDS[row]
    sides = {name: GRIDS[name][CHOSEN[name]] for name in (kind.synchronous, kind.rare, kind.alone)}
    base, rare, alone = outcomes(sides, SEEDS).values()
    conditions = {"seeds": len(SEEDS), "workers": WORKERS, "steps": STEPS, "parameters": base[0].parameters}
    traffic = {"traffic": f"1/{rare[0].traffic:.0f}", "traffic_target": f"1/{kind.least}"}
    return {
        row: {**_beside(base, kind.rare, rare, "<= 1.02"), **traffic, **conditions},
        f"{row}_alone": {**_beside(base, "alone", alone, "-"), **conditions},
    }


def _beside(base: Sequence[Outcome], name: str, outcomes: Sequence[Outcome], target: str) -> dict[str, Any]:
    """Losses over those of synchronous training with the same seeds: the ratio of means, and of each seed."""
    ratios = [ours.reported / theirs.reported for ours, theirs in zip(outcomes, base, strict=True)]
    return {
        "value": _mean_reported(outcomes) / _mean_reported(base),
        "target": target,
        "spread": f"{stdev(ratios):.4f} ({min(ratios):.4f}-{max(ratios):.4f})",
        name: _losses(outcomes),
        "synchronous": _losses(base),
    }


def _mean_reported(outcomes: Sequence[Outcome]) -> float:
    return mean(outcome.reported for outcome in outcomes)


def _losses(outcomes: Sequence[Outcome]) -> str:
    losses = [outcome.reported for outcome in outcomes]
    return f"{mean(losses):.4f} ± {stdev(losses):.4f}"


def outcomes(sides: Mapping[str, Side], seeds: Sequence[int]) -> dict[str, list[Outcome]]:
    """Run each side with each seed."""
    by_side: dict[str, list[Outcome]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as scratch, connected("bench"):
        dataset = _dataset(Path(scratch))
        for seed, name in product(seeds, sides):
            outcome = _run(f"{name}-{seed}", sides[name], seed, Path(scratch), dataset)
            line = f"{name}, seed {seed}: {outcome.choosing:.4f}, {outcome.reported:.4f}"
            print(line, file=sys.stderr, flush=True)
            by_side[name].append(outcome)
    return by_side


def tune() -> None:
    """Print the loss of everything in the grids on the half that chooses."""
    sides = {}
    for name, grid in GRIDS.items():
        for number, side in enumerate(grid):
            sides[f"{name}-{number}"] = side
    for name, outcomes_of_side in outcomes(sides, TUNING_SEEDS).items():
        loss = mean(outcome.choosing for outcome in outcomes_of_side)
        print(f"{name} {loss:.4f} {sides[name].tables}", flush=True)


def _dataset(scratch: Path) -> Path:
    folder = scratch / "corpus"
    options = PrepareOptions("stdlib", str(folder), seq_len=SEQ_LEN, max_samples=100_000, validation_samples=HELD_OUT)
    prepare(options, lambda kind, count: None)
    return folder


def _run(name: str, side: Side, seed: int, parent: Path, dataset: Path) -> Outcome:
    job = side.job(name, seed, dataset)
    directory = RunDirectory.create(parent, name, resolved_toml(job))
    moved_bytes = 0
    for record in records(job, name, directory, in_folder(dataset)):
        if record["kind"] == "round":
            moved_bytes += record["bytes_up"] + record["bytes_down"]
    finish(job, directory, in_folder(dataset))
    model = AutoModelForCausalLM.from_pretrained(directory.path / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Outcome(*_held_out(job, model, dataset), moved_bytes, parameters, side.total)


def _held_out(job: Job, model: PreTrainedModel, dataset: Path) -> tuple[float, float]:
    """Loss in nats a token on both halves of what was held out."""
    manifest = read_manifest(dataset)
    slices = [read_slice(dataset, info, manifest) for info in manifest.slices if info.split == "validation"]
    arrays = {}
    for name in slices[0]:
        arrays[name] = np.concatenate([slice_arrays[name] for slice_arrays in slices])
    samples = len(arrays["input_ids"])
    task = task_of(job.model, model)
    losses = []
    for half in (slice(samples // 2), slice(samples // 2, None)):
        parts = {}
        for name, array in arrays.items():
            parts[name] = torch.from_numpy(array[half]).split(8 * BATCH)
        batches = [dict(zip(parts, batch, strict=True)) for batch in zip(*parts.values(), strict=True)]
        loss_sum, count = evaluate(model, task, batches, "cpu")["val_loss"]
        losses.append(loss_sum / count)
    return losses[0], losses[1]


if __name__ == "__main__":
    tune()
