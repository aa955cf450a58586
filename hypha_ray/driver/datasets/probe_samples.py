"""Samples with which workers try sizes of batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hypha_ray.driver.datasets.data_source import DataSource
from hypha_ray.errors import DataError
from hypha_ray.model.tasks.task import IGNORE_INDEX
from hypha_ray.types import Arrays, Samples

FEW = 4
"""Number of samples that are sent to workers."""


def probe_samples(source: DataSource) -> Samples:
    """Return a few training samples with the most to train on: labels that are scored, or tokens.

    Raises:
        DataError: no slice can be read.

    """
    failed: DataError | None = None
    for info in source.manifest.of("train"):
        try:
            arrays = source.read(info)
        except DataError as error:
            failed = error
            continue
        rows = np.argsort(-_scored(arrays, info.samples), kind="stable")[:FEW]
        keys = np.stack([np.zeros_like(rows), np.full_like(rows, info.index), rows], axis=1)
        return Samples({name: array[rows] for name, array in arrays.items()}, keys)
    assert failed is not None  # A dataset has a training slice.
    raise failed


def _scored(arrays: Arrays, samples: int) -> npt.NDArray[np.int64]:
    """Number of scored labels, or of tokens, of each sample; zeros if it has neither."""
    marks = arrays["labels"] != IGNORE_INDEX if "labels" in arrays else arrays.get("attention_mask", np.zeros(samples))
    return np.asarray(marks.reshape(samples, -1).sum(axis=1), np.int64)
