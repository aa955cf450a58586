"""Several datasets as one: mixtures and datasets in parts; and the datasets that a run began with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypha_ray.data.manifest import Manifest, TensorInfo
from hypha_ray.data.slices import merge
from hypha_ray.errors import DataError
from hypha_ray.types import SLICES_PER_DATASET, SliceInfo, TokenRules, dataset_of

DATASET = "dataset.json"
"""File in a run directory with the name and the identities of the run's datasets, wherever they lie."""
COPY = "dataset"
"""Folder in a run directory with manifest and tokenizer of a dataset that isn't on the driver's machine."""

OTHER_SAMPLES = "DATA046"
"""Error code for a folder, URL or data node with other samples than those that a run began with."""


def mixed(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of a mixture; slices of dataset d begin at d · `SLICES_PER_DATASET`.

    Raises:
        DataError: the datasets differ in modality, tensors or preprocessor, or one of them has nothing to train on.

    """
    _require_alike(manifests, "mixed")
    slices = []
    for dataset, manifest in enumerate(manifests):
        problem = f"dataset {manifest.name!r} can't be part of a mixture"
        if not manifest.of("train"):
            raise DataError("DATA062", problem, "nothing to train on", fix="prepare it again")
        for info in manifest.slices:
            if info.index >= SLICES_PER_DATASET:
                raise DataError("DATA062", problem, "too many slices", fix="prepare it again")
            slices.append(replace(info, index=dataset * SLICES_PER_DATASET + info.index))
    name = "+".join(manifest.name for manifest in manifests)
    return _joined(manifests, name, slices)


def identities(manifest: Manifest) -> list[str]:
    """Identity of each dataset of a mixture, in its order; a single dataset has its own identity."""
    slices: dict[int, list[SliceInfo]] = {}
    for info in manifest.slices:
        dataset = dataset_of(info.index)
        slices.setdefault(dataset, []).append(replace(info, index=info.index % SLICES_PER_DATASET))
    sha256s = []
    for dataset in sorted(slices):
        dataset_manifest = manifest.model_copy(update={"slices": tuple(slices[dataset])})
        sha256s.append(dataset_manifest.identity)
    return sha256s


def whole(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of a dataset, from manifests of its parts; the same part may be there more than once.

    Raises:
        DataError: parts are missing, or differ in modality, tensors or preprocessor.

    """
    parts = {manifest.part: manifest for manifest in manifests}
    if None in parts:
        return parts[None]
    numbers = set[int]()
    count = 0
    for part in filter(None, parts):
        numbers.add(part[0])
        count = max(count, part[1])
    missing = sorted(set(range(count)) - numbers)
    if missing:
        problem = f"dataset {manifests[0].name!r} has parts, and not all of them are here"
        listed_parts = ", ".join(f"{number}/{count}" for number in missing[:8])
        fix = "serve all parts under one name: `python jobs/data.py --serve DIR --name NAME` on the machine of each"
        raise DataError("DATA045", problem, f"no part {listed_parts}", f"all {count}", fix)
    ordered = [parts[number, count] for number in range(count)]
    _require_alike(ordered, "parts of one dataset")
    slices = list[SliceInfo]()
    for manifest in ordered:
        slices.extend(manifest.slices)
    return _joined(ordered, ordered[0].name, slices)


def require_one_vocabulary(datasets: Sequence[tuple[str, Path]]) -> None:
    """Refuse tokenizers that have one name and number of tokens, but other tokens.

    Args:
        datasets: name of each dataset, and folder of its tokenizer.

    Raises:
        DataError: DATA062, two of them differ.

    """
    first_manifest, first_folder = datasets[0]
    for name, folder in datasets[1:]:
        if not same_tokens(first_folder, folder):
            problem = (
                f"datasets {first_manifest!r} and {name!r} can't be mixed: the same numbers are other tokens in them"
            )
            fix = "prepare both with one tokenizer that is saved: --tokenizer and its folder"
            raise DataError("DATA062", problem, "tokenizers of one name that differ", "one tokenizer", fix)


def joined_rules(datasets: Sequence[tuple[str, TokenRules | None]]) -> TokenRules | None:
    """The rules of tokens that hold for several datasets: texts end at any token that ends texts of one of them.

    Args:
        datasets: name of each dataset, and its rules; None: an earlier release prepared it, and its texts begin with
            nothing.

    Raises:
        DataError: DATA062, texts without a template begin with other tokens in one of them, or chats have another
            chat template.

    """
    all_rules = [rules for _, rules in datasets if rules is not None]
    if not all_rules:
        return None
    begin = _common_begin(datasets)
    if begin is None:
        begin = all_rules[0].begin
    ends: dict[int, None] = {}
    vocab_size: int | None = None
    for rules in all_rules:
        ends |= dict.fromkeys(rules.ends)
        if rules.vocab_size is not None:
            vocab_size = max(vocab_size or 0, rules.vocab_size)
    return TokenRules(begin, tuple(ends), vocab_size, _common_template(datasets), _common_system(all_rules))


def _common_system(all_rules: Sequence[TokenRules]) -> str | None:
    """The system message that was put before chats of all datasets with a template; None if they differ."""
    systems = {rules.system for rules in all_rules if rules.template_sha256}
    if len(systems) != 1:
        return None
    return systems.pop()


def _common_template(datasets: Sequence[tuple[str, TokenRules | None]]) -> str | None:
    """The hash of the chat template that all datasets with one have: a model is saved with one; None without any."""
    templates: dict[str, str] = {}
    for name, rules in datasets:
        if rules is not None and rules.template_sha256:
            templates.setdefault(rules.template_sha256, name)
    if len(templates) > 1:
        first_name, second_name, *_ = templates.values()
        problem = f"datasets {first_name!r} and {second_name!r} can't be mixed: their chats have different templates"
        raise DataError("DATA062", problem, fix="prepare both again with the same --chat-template")
    return next(iter(templates), None)


def _common_begin(datasets: Sequence[tuple[str, TokenRules | None]]) -> tuple[int, ...] | None:
    """The tokens that begin texts without a template in all datasets; None if all texts have one."""
    first_name: str | None = None
    first_begin: tuple[int, ...] | None = None
    for name, rules in datasets:
        if rules is not None and rules.template_sha256:
            continue
        begin = () if rules is None else rules.begin
        if first_begin is None:
            first_name = name
            first_begin = begin
        elif begin != first_begin:
            problem = f"datasets {first_name!r} and {name!r} can't be mixed: their texts begin with different tokens"
            fix = "prepare both again, by this release and with the same tokenizer"
            raise DataError("DATA062", problem, _ids_text(begin), _ids_text(first_begin), fix)
    return first_begin


def _ids_text(ids: Sequence[int]) -> str:
    if not ids:
        return "none"
    return f"ids {' '.join(map(str, ids))}"


def _joined(manifests: Sequence[Manifest], name: str, slices: Sequence[SliceInfo]) -> Manifest:
    """One manifest for several datasets, with bounds that cover all."""
    tensors: tuple[TensorInfo, ...] = ()
    for widened in _equally_wide(manifests):
        tensors = merge(tensors or widened, widened, name)
    tokens = joined_rules([(manifest.name, manifest.tokens) for manifest in manifests])
    update = {"name": name, "slices": tuple(slices), "tensors": tensors, "tokens": tokens}
    return manifests[0].model_copy(update=update | {"origin": None, "part": None})


def _equally_wide(manifests: Sequence[Manifest]) -> list[tuple[TensorInfo, ...]]:
    """Tensors of datasets; prompts and records are all as long as the longest, since batches are padded."""
    if manifests[0].modality != "prompts":
        return [manifest.tensors for manifest in manifests]
    widened = []
    for manifest in manifests:
        tensors = []
        for number, tensor in enumerate(manifest.tensors):
            shapes = [dataset.tensors[number].shape for dataset in manifests]
            widest_shape = tuple(map(max, zip(*shapes, strict=True)))
            tensors.append(replace(tensor, shape=widest_shape))
        widened.append(tuple(tensors))
    return widened


def _require_alike(manifests: Sequence[Manifest], use: str) -> None:
    """Refuse datasets that can't be joined, since they differ from the first one."""
    first_manifest = manifests[0]
    for manifest in manifests[1:]:
        problem = f"datasets {first_manifest.name!r} and {manifest.name!r} can't be {use}"
        for noun, got, allowed in (
            ("modality", manifest.modality, first_manifest.modality),
            ("tensors", _tensors_text(manifest), _tensors_text(first_manifest)),
            ("classes", str(manifest.classes), str(first_manifest.classes)),
            ("tokenizer", _preprocessor_text(manifest), _preprocessor_text(first_manifest)),
        ):
            if got != allowed:
                fix = f"prepare both with the same {noun}"
                raise DataError("DATA062", f"{problem}: they differ in their {noun}", got, allowed, fix)


def _tensors_text(manifest: Manifest) -> str:
    texts = []
    for tensor in manifest.tensors:
        shape = "" if manifest.modality == "prompts" else list(tensor.shape)
        texts.append(f"{tensor.name} {tensor.dtype} {shape}")
    return ", ".join(sorted(texts))


def _preprocessor_text(manifest: Manifest) -> str:
    preprocessor = manifest.preprocessor
    if preprocessor is None:
        return "none"
    return f"{preprocessor.name}, {preprocessor.vocab_size} tokens, revision {preprocessor.revision}"


@dataclass(frozen=True, slots=True)
class RunDataset:
    """Identity of a run's dataset, and of each dataset of a mixture; empty if an earlier release began the run."""

    sha256: str | None = None
    datasets: tuple[str, ...] = ()

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> RunDataset:
        """Read the fields of the file; one that is missing or damaged has none."""
        sha256 = fields.get("sha256")
        sha256s = fields.get("datasets", ())
        return cls(sha256 if isinstance(sha256, str) else None, tuple(map(str, sha256s)))

    def of(self, dataset: int) -> str | None:
        """Identity of a dataset by its number; None if it isn't known."""
        if dataset < len(self.datasets):
            return self.datasets[dataset]
        return None


def described(manifest: Manifest) -> str:
    """Text of the file for a run on this dataset."""
    record = {"name": manifest.name, "sha256": manifest.identity, "datasets": identities(manifest)}
    return json.dumps(record)


def other_slice(name: str, index: int, got_sha256: str | None, sha256: str) -> DataError:
    """Error for a slice whose hash isn't `sha256`, which the run began with; None: the slice is missing."""
    error = other_dataset(name, [got_sha256 or "missing"], sha256)
    return DataError(error.code, error.what, f"slice {index}: {error.got}", error.allowed, error.fix)


def other_dataset(name: str, got_identities: Iterable[str], identity: str) -> DataError:
    """Error for datasets of these identities, if the run began with another one."""
    problem = f"dataset {name!r} has other samples now than the run began with"
    fix = "put the folder back as it was, or prepare it again by the same options; other samples need another run.name"
    got = ", ".join(sha256[:12] for sha256 in sorted(got_identities))
    return DataError(OTHER_SAMPLES, problem, got, identity[:12], fix)


def same_tokens(first: Path, second: Path) -> bool:
    """Whether no id stands for different tokens in two saved tokenizers.

    Special tokens, which models of one family rename, don't count. Without `tokenizer.json` tokens aren't known, and
    nothing differs.
    """
    first_tokens = _tokens_by_id(first)
    second_tokens = _tokens_by_id(second)
    common_ids = first_tokens.keys() & second_tokens.keys()
    return all(first_tokens[token_id] == second_tokens[token_id] for token_id in common_ids)


def _tokens_by_id(folder: Path) -> dict[int, str]:
    """Tokens of a saved tokenizer by id, without special ones; empty if they aren't known."""
    try:
        file = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = file["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {token_id: token for token, token_id in vocabulary.items()}
        else:
            tokens = {token_id: token for token_id, (token, _) in enumerate(vocabulary)}
        for token in file["added_tokens"]:
            tokens.pop(token["id"], None)
        return tokens
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
