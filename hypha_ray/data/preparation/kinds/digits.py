"""From scikit-learn's images of digits to a prepared dataset, which needs no preprocessor."""

from __future__ import annotations

import numpy as np

from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import SliceWriter
from hypha_ray.data.preparation.sources.documents import digits
from hypha_ray.errors import ConfigError


def write_digits(options: Options, writer: SliceWriter) -> None:
    """Write the slices of both splits, which have the same proportions of classes."""
    from sklearn.model_selection import train_test_split

    arrays = digits()
    labels = arrays["labels"]
    train = np.random.default_rng(options.seed).permutation(len(labels))
    validation = np.empty(0, np.int64)
    held_out = min(options.validation_samples, round(options.validation_fraction * len(labels)))
    if held_out:
        try:
            train, validation = train_test_split(
                train, test_size=held_out, stratify=labels[train], random_state=options.seed
            )
        except ValueError as error:
            allowed = "none, or at least one image of each of 10 classes in both splits"
            raise ConfigError("PREP005", "validation can't have all classes", str(error), allowed) from None
    for split, rows in (("train", train[: options.max_samples]), ("validation", validation)):
        if len(rows):
            writer.add({name: array[rows] for name, array in arrays.items()}, split)
