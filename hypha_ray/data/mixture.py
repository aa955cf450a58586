"""Several datasets as one: mixtures and datasets in parts; and the datasets that a run began with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from hypha_ray.data.manifest import Manifest, TensorInfo
from hypha_ray.data.slices import merge
from hypha_ray.data.storage.files import same_tokens
from hypha_ray.errors import DataError
from hypha_ray.types import SLICES_PER_DATASET, SliceInfo, TokenRules, dataset_of


def mixed(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of a mixture; slices of dataset d begin at d · `SLICES_PER_DATASET`.

    Raises:
        DataError: the datasets differ in modality, tensors or preprocessor, or one of them has nothing to train on.

    """
    _require_alike(manifests, "mixed")
    for manifest in manifests:
        if not manifest.of("train") or any(info.index >= SLICES_PER_DATASET for info in manifest.slices):
            problem = f"dataset {manifest.name!r} can't be part of a mixture"
            got = "nothing to train on" if not manifest.of("train") else "too many slices"
            raise DataError("DATA062", problem, got, fix="prepare it again")
    slices = tuple(
        replace(info, index=number * SLICES_PER_DATASET + info.index)
        for number, manifest in enumerate(manifests)
        for info in manifest.slices
    )
    return _joined(manifests, "+".join(manifest.name for manifest in manifests), slices)


def identities(manifest: Manifest) -> list[str]:
    """Identity of each dataset of a mixture, in its order; of one dataset its own."""
    by_dataset: dict[int, list[SliceInfo]] = {}
    for info in manifest.slices:
        own = replace(info, index=info.index % SLICES_PER_DATASET)
        by_dataset.setdefault(dataset_of(info.index), []).append(own)
    return [manifest.model_copy(update={"slices": tuple(by_dataset[number])}).identity for number in sorted(by_dataset)]


def whole(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of a dataset, of whose parts these are some; the same part may be there more than once.

    Raises:
        DataError: parts are missing, or differ in modality, tensors or preprocessor.

    """
    parts = {manifest.part: manifest for manifest in manifests}
    if None in parts:
        return parts[None]
    numbers = {part[0] for part in parts if part is not None}
    count = max(part[1] for part in parts if part is not None)
    if missing := sorted(set(range(count)) - numbers):
        problem = f"dataset {manifests[0].name!r} has parts, and not all of them are here"
        listed = ", ".join(f"{number}/{count}" for number in missing[:8])
        fix = "serve all parts under one name: `python jobs/data.py --serve DIR --name NAME` on the machine of each"
        raise DataError("DATA045", problem, f"no part {listed}", f"all {count}", fix)
    ordered = [parts[number, count] for number in range(count)]
    _require_alike(ordered, "parts of one dataset")
    return _joined(ordered, ordered[0].name, tuple(info for manifest in ordered for info in manifest.slices))


def require_one_vocabulary(datasets: Sequence[tuple[str, Path]]) -> None:
    """Refuse tokenizers that have one name and number of tokens, but other tokens.

    Args:
        datasets: name of each dataset, and folder of its tokenizer.

    Raises:
        DataError: DATA062, two of them differ.

    """
    (first, folder), *others = datasets
    for other, place in others:
        if not same_tokens(folder, place):
            problem = f"datasets {first!r} and {other!r} can't be mixed: the same numbers are other tokens in them"
            fix = "prepare both with one tokenizer that is saved: --tokenizer and its folder"
            raise DataError("DATA062", problem, "tokenizers of one name that differ", "one tokenizer", fix)


def joined_rules(each: Sequence[tuple[str, TokenRules | None]]) -> TokenRules | None:
    """The decisions about tokens that hold for several datasets: texts end at any token that ends those of one.

    Args:
        each: name of each dataset, and its decisions; None: an earlier release prepared it, and its texts begin with
            nothing.

    Raises:
        DataError: DATA062, texts without a template begin with other tokens in one of them.

    """
    known = [rules for _, rules in each if rules is not None]
    if not known:
        return None
    begins = [(name, rules or TokenRules()) for name, rules in each if rules is None or not rules.template_sha256]
    for name, rules in begins[1:]:
        if rules.begin != begins[0][1].begin:
            problem = f"datasets {begins[0][0]!r} and {name!r} can't be mixed: their texts begin with different tokens"
            fix = "prepare both again, by this release and with the same tokenizer"
            raise DataError("DATA062", problem, _shown(rules.begin), _shown(begins[0][1].begin), fix)
    ends = dict.fromkeys(end for rules in known for end in rules.ends)
    begin = begins[0][1].begin if begins else known[0].begin
    template = next((rules.template_sha256 for rules in known if rules.template_sha256), None)
    sizes = [rules.vocab_size for rules in known if rules.vocab_size is not None]
    return TokenRules(begin, tuple(ends), max(sizes, default=None), template)


def _shown(begin: Sequence[int]) -> str:
    return f"ids {' '.join(map(str, begin))}" if begin else "none"


def _joined(manifests: Sequence[Manifest], name: str, slices: tuple[SliceInfo, ...]) -> Manifest:
    bounds = reduce(lambda known, found: merge(known, found, name), _equally_wide(manifests))
    rules = {"tokens": joined_rules([(manifest.name, manifest.tokens) for manifest in manifests])}
    update = {"name": name, "slices": slices, "tensors": bounds, "origin": None, "part": None, **rules}
    return manifests[0].model_copy(update=update)


def _equally_wide(manifests: Sequence[Manifest]) -> list[tuple[TensorInfo, ...]]:
    """Tensors of datasets, all prompts and records being as long as the longest: batches are padded."""
    each = [manifest.tensors for manifest in manifests]
    if manifests[0].modality != "prompts":
        return each
    widest = [tuple(map(max, zip(*(one.shape for one in same), strict=True))) for same in zip(*each, strict=True)]
    return [tuple(replace(one, shape=shape) for one, shape in zip(own, widest, strict=True)) for own in each]


def _require_alike(manifests: Sequence[Manifest], use: str) -> None:
    for other in manifests[1:]:
        _require_like(manifests[0], other, use)


def _require_like(first: Manifest, other: Manifest, use: str) -> None:
    problem = f"datasets {first.name!r} and {other.name!r} can't be {use}"
    for thing, got, allowed in (
        ("modality", other.modality, first.modality),
        ("tensors", _tensors(other), _tensors(first)),
        ("classes", str(other.classes), str(first.classes)),
        ("tokenizer", _made_by(other), _made_by(first)),
    ):
        if got != allowed:
            fix = f"prepare both with the same {thing}"
            raise DataError("DATA062", f"{problem}: they differ in their {thing}", got, allowed, fix)


def _tensors(manifest: Manifest) -> str:
    free = manifest.modality == "prompts"
    shapes = (f"{tensor.name} {tensor.dtype} {'' if free else list(tensor.shape)}" for tensor in manifest.tensors)
    return ", ".join(sorted(shapes))


def _made_by(manifest: Manifest) -> str:
    made_by = manifest.preprocessor
    return "none" if made_by is None else f"{made_by.name}, {made_by.vocab_size} tokens, revision {made_by.revision}"


DATASET = "dataset.json"
"""File in a run directory with the name and the identities of the run's datasets, wherever they lie."""
COPY = "dataset"
"""Folder in a run directory with manifest and tokenizer of a dataset that isn't on the driver's machine."""

OTHER_SAMPLES = "DATA046"
"""Error code for a place with other samples than those that a run began with."""


@dataclass(frozen=True, slots=True)
class RunDataset:
    """Identity of a run's dataset, and of each dataset of a mixture; empty if an earlier release began the run."""

    sha256: str | None = None
    each: tuple[str, ...] = ()

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> RunDataset:
        """Read the fields of the file; one that is missing or damaged has none."""
        sha256 = fields.get("sha256")
        each = fields.get("datasets", ())
        return cls(sha256 if isinstance(sha256, str) else None, tuple(map(str, each)))

    def of(self, number: int) -> str | None:
        """Identity of a dataset by its number; None if it isn't known."""
        return self.each[number] if number < len(self.each) else None


def described(manifest: Manifest) -> str:
    """Text of the file for a run on this dataset."""
    each = {"sha256": manifest.identity, "datasets": identities(manifest)}
    return json.dumps({"name": manifest.name, **each})


def other_slice(name: str, index: int, other: str | None, sha256: str) -> DataError:
    """Error that a place has a slice of another hash, or None, in the place of one that a run began with."""
    error = other_dataset(name, [other or "missing"], sha256)
    return DataError(error.code, error.what, f"slice {index}: {error.got}", error.allowed, error.fix)


def other_dataset(name: str, others: Iterable[str], identity: str) -> DataError:
    """Error that a place has datasets of these identities, and not the one that a run began with."""
    problem = f"dataset {name!r} has other samples now than the run began with"
    fix = "put the folder back as it was, or prepare it again by the same options; other samples need another run.name"
    return DataError(OTHER_SAMPLES, problem, ", ".join(other[:12] for other in sorted(others)), identity[:12], fix)
