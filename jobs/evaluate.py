"""Evaluate a saved model on a prepared dataset: loss and perplexity, or accuracy.

    python jobs/evaluate.py --model RUN/model --dataset data/stdlib
    python jobs/evaluate.py --model RUN/model --dataset data/digits --split train --json

The last line is for programs: `val_loss 2.4312 perplexity 11.37 tokens 65280`, or the same as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from hypha_ray.config.cli.entry_point import run
from hypha_ray.config.cli.options import parse_options
from hypha_ray.errors import CheckpointError, ConfigError, DataError
from hypha_ray.heavy_imports import uncollected


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a saved model on a prepared dataset: loss and perplexity, or accuracy."""

    model: Path
    """folder from save_pretrained, such as a run's model"""
    dataset: Path
    """folder of the prepared dataset"""
    split: str = "validation"
    """split of the dataset"""
    batch_size: int = 32
    """samples in a batch; the result doesn't depend on it"""
    type: str | None = None
    """task as in model.type; default: the model's own"""
    json: bool = False
    """print the last line as JSON"""


def main() -> None:
    """Parse first, import later: `--help` and a mistyped flag answer at once."""
    arguments = parse_options(Evaluate, __doc__, sys.argv[1:])
    if arguments.batch_size < 1:
        raise ConfigError("CFG003", "--batch-size is out of range", str(arguments.batch_size), "1 or more")
    from hypha_ray.data.catalogue import load
    from hypha_ray.data.slices import read_slice

    manifest = load(arguments.dataset)
    manifest.refuse_prompts()
    infos = manifest.of(arguments.split)
    if not infos:
        splits = ", ".join(sorted({info.split for info in manifest.slices}))
        raise DataError("DATA051", f"dataset {manifest.name!r} has no such split", arguments.split, splits)
    with uncollected():
        import torch

        from hypha_ray.model.evaluation import batches_of, evaluate, metrics_of
        from hypha_ray.model.loading.build import describe
        from hypha_ray.model.loss_check import check_loss_of
        from hypha_ray.model.positions import require_positions
        from hypha_ray.model.saved_model import open_saved
        from hypha_ray.model.tasks.table import require_trainable

    start, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, task = open_saved(arguments.model, arguments.type)
    require_trainable(task)
    require_positions(network, task, manifest.shapes, manifest.name)
    facts = describe(network, task)
    manifest.require(facts.vocab_size, facts.num_labels)
    slices = (read_slice(arguments.dataset, info, manifest) for info in infos)
    batches = batches_of(slices, arguments.batch_size, [info.index for info in infos])
    first = next(batches)
    check_loss_of(task, network, first)
    sums = evaluate(network.to(device), task, chain([first], batches), device)
    loss_sum, count = sums["val_loss"]
    if not count:
        fix = "choose another --split, or prepare the dataset for this task"
        raise DataError("DATA052", f"nothing in {manifest.name}/{arguments.split} can be scored", task.name, fix=fix)
    print(f"{facts.architecture}  {task.name}  {manifest.name}/{arguments.split}  {time.monotonic() - start:.1f} s")
    result = {name: value for name, value in metrics_of(task, sums).items() if value is not None}
    if "val_loss" not in result:
        raise CheckpointError("MODEL018", "the model's loss isn't a finite number", f"{loss_sum / count}")
    line = " ".join(f"{name} {value if isinstance(value, int) else f'{value:.6g}'}" for name, value in result.items())
    print(json.dumps(result, allow_nan=False) if arguments.json else line)


if __name__ == "__main__":
    run(main)
