"""The tiny job of sorting two digits, for benchmarks that take steps of an `Island` themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.data.catalogue import load as load_manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import read_slice
from hypha_ray.driver.data_source import in_folder, job_preprocessor
from hypha_ray.model.tokenizers import tokenizer_of
from hypha_ray.types import Samples

TINY = Path(__file__).parents[3] / "jobs" / "configs" / "grpo-tiny.toml"


def sorting(scratch: Path) -> Path:
    """Prepare the prompts in a folder of their own."""
    dataset = scratch / "sort2"
    prepare(PrepareOptions("problems:sort2", str(dataset), tokenizer="characters"), lambda kind, count: None)
    return dataset


def tiny_job(dataset: Path, *flags: str) -> tuple[Job, Any]:
    """Return the job with these flags, and its tokenizer."""
    job = load(["@", str(TINY), *flags, "--dataset.path", str(dataset)]).job
    return job, tokenizer_of(job_preprocessor(job, in_folder(dataset)))


def batches(dataset: Path, size: int, split: str = "train") -> Iterator[Samples]:
    """Yield batches of the first slice, again and again."""
    manifest = load_manifest(dataset)
    info = manifest.of(split)[0]
    arrays = read_slice(dataset, info, manifest)
    for epoch in count():
        for start in range(0, info.samples - size + 1, size):
            rows = np.arange(start, start + size)
            keys = np.stack([np.full_like(rows, epoch), np.full_like(rows, info.index), rows], 1)
            yield Samples({name: array[rows] for name, array in arrays.items()}, keys)
