"""Several datasets as one: their slices get numbers that tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import merge
from hypha_ray.errors import DataError
from hypha_ray.types import SLICES_PER_DATASET

MOST_DATASETS = 100
"""Most datasets in a mixture."""


def mixed(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of a mixture; slices of dataset d begin at d · `SLICES_PER_DATASET`.

    Raises:
        DataError: the datasets differ in modality, tensors or preprocessor, or one of them has nothing to train on.

    """
    first = manifests[0]
    for other in manifests:
        _require_like(first, other)
    tensors = [manifest.tensors for manifest in manifests]
    slices = tuple(
        replace(info, index=number * SLICES_PER_DATASET + info.index)
        for number, manifest in enumerate(manifests)
        for info in manifest.slices
    )
    name = "+".join(manifest.name for manifest in manifests)
    bounds = reduce(lambda known, found: merge(known, found, name), tensors)
    return first.model_copy(update={"name": name, "slices": slices, "tensors": bounds, "origin": None})


def _require_like(first: Manifest, other: Manifest) -> None:
    what = f"datasets {first.name!r} and {other.name!r} can't be mixed"
    for thing, got, allowed in (
        ("modality", other.modality, first.modality),
        ("tensors", _tensors(other), _tensors(first)),
        ("classes", str(other.classes), str(first.classes)),
        ("tokenizer", _made_by(other), _made_by(first)),
    ):
        if got != allowed:
            fix = f"prepare both with the same {thing}"
            raise DataError("DATA062", f"{what}: they differ in their {thing}", got, allowed, fix)
    if not other.of("train") or any(info.index >= SLICES_PER_DATASET for info in other.slices):
        what = f"dataset {other.name!r} can't be part of a mixture"
        got = "nothing to train on" if not other.of("train") else "too many slices"
        raise DataError("DATA062", what, got, fix="prepare it again")


def _tensors(manifest: Manifest) -> str:
    shapes = (f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in manifest.tensors)
    return ", ".join(sorted(shapes))


def _made_by(manifest: Manifest) -> str:
    made_by = manifest.preprocessor
    return "none" if made_by is None else f"{made_by.name}, {made_by.vocab_size} tokens, revision {made_by.revision}"
