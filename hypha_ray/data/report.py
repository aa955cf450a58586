"""Text about a prepared dataset of tokens: lengths of its samples, and one sample as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.encoders import FOLDER, load_tokenizer
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.model.checks import token_counts
from hypha_ray.model.task import IGNORE_INDEX

_BARS = 8
_WIDTH = 40
_MARKS = "«", "»"
_LABELS = "labels"

Part: TypeAlias = tuple[str, bool]
"""Text of consecutive tokens, and whether they are scored."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the training samples in tokens, without padding.

    `scored` is the number of their tokens with a label; None if tokens have no labels of their own. Of pairs it is the
    number of tokens in targets.
    """

    lengths: npt.NDArray[np.int64]
    scored: int | None

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum())

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sample."""
        return int(self.lengths.min())

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.lengths.max())

    @property
    def median(self) -> float:
        """Tokens of the median sample."""
        return float(np.median(self.lengths))

    def bars(self) -> Iterator[str]:
        """Lines of a bar chart: a range of lengths and its number of samples."""
        edges = np.unique(np.linspace(self.shortest, self.longest + 1, _BARS + 1).astype(int))
        counts, _ = np.histogram(self.lengths, edges)
        highest = max(counts)
        for start, end, count in zip(edges[:-1], edges[1:], counts, strict=True):
            bar = "█" * round(_WIDTH * count / highest)
            yield f"{start:>6,} to {end - 1:>6,} {count:>9,} {bar}".rstrip()


def lengths_of(folder: Path, manifest: Manifest, *, are_pairs: bool = False) -> Lengths:
    """Lengths of the training samples, read from their slices; labels of pairs are tokens of a target.

    Raises:
        DataError: a slice is missing or damaged.

    """
    lengths = []
    scored = 0
    for info in manifest.of("train"):
        arrays = read_slice(folder, info, manifest)
        lengths.append(token_counts(arrays))
        is_scored = arrays[_LABELS] != IGNORE_INDEX if are_pairs else _scored(arrays, manifest)
        scored += int(is_scored.sum())
    has_token_labels = are_pairs or _has_token_labels(manifest)
    return Lengths(np.concatenate(lengths), scored if has_token_labels else None)


def sample_of(folder: Path, manifest: Manifest, *, are_pairs: bool = False) -> list[Part]:
    """Parts of the first sample of the first slice, special tokens included; that of pairs ends with the scored target.

    Raises:
        DataError: the slice is missing or damaged.

    """
    arrays = read_slice(folder, manifest.slices[0], manifest)
    ids = arrays["input_ids"][0][: token_counts(arrays)[0]]
    tokenizer = load_tokenizer(str(folder / FOLDER))
    if are_pairs:
        labels = arrays[_LABELS][0]
        target = labels[labels != IGNORE_INDEX]
        return [(tokenizer.decode(ids), False), (tokenizer.decode(target), True)]
    scored = _scored(arrays, manifest)[0]
    tokens = zip(ids.tolist(), scored.tolist(), strict=False)
    parts: list[Part] = []
    for is_scored, run in groupby(tokens, key=lambda token: token[1]):
        text = tokenizer.decode([token_id for token_id, _ in run])
        parts.append((text, is_scored))
    return parts


def preference_texts(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Prompt and answers of the first sample of the first slice, special tokens included.

    Raises:
        DataError: the slice is missing or damaged.

    """
    arrays = read_slice(folder, manifest.slices[0], manifest)
    tokenizer = load_tokenizer(str(folder / FOLDER))
    names = ["chosen", "rejected"]
    if "desirable" in arrays:
        names = ["desirable" if arrays["desirable"][0] else "undesirable"]
    texts = {}
    for side, name in enumerate(names):
        ids = arrays["input_ids"][0, side][arrays["attention_mask"][0, side] == 1]
        start = int((arrays[_LABELS][0, side] != IGNORE_INDEX).argmax())
        texts["prompt"] = tokenizer.decode(ids[:start])
        texts[name] = tokenizer.decode(ids[start:])
    return texts


def marked(parts: list[Part], coloured: bool) -> Any:
    """Text for a console: scored parts in green, or between « and »."""
    from rich.text import Text

    opening, closing = _MARKS
    sample = Text()
    for text, scored in parts:
        if coloured:
            sample.append(text, "green" if scored else "dim")
        else:
            sample.append(f"{opening}{text}{closing}" if scored else text)
    return sample


def class_counts(folder: Path, manifest: Manifest) -> dict[str, int]:
    """Number of labels of each class, over both splits; empty if labels have no names.

    Raises:
        DataError: a slice is missing or damaged.

    """
    if manifest.classes is None:
        return {}
    names = manifest.classes.names
    counts = np.zeros(len(names), np.int64)
    for info in manifest.slices:
        labels = read_slice(folder, info, manifest)[_LABELS].astype(np.int64)
        if manifest.classes.several:
            counts += labels.sum(axis=0)
        else:
            counts += np.bincount(labels[labels != IGNORE_INDEX], minlength=len(names))
    return dict(zip(names, counts.tolist(), strict=True))


def _has_token_labels(manifest: Manifest) -> bool:
    """Whether there is a label for each token; several classes of a text may be as many as its tokens."""
    has_several = manifest.classes is not None and manifest.classes.several
    return not has_several and manifest.shapes.get(_LABELS) == manifest.shapes["input_ids"]


def _scored(arrays: Arrays, manifest: Manifest) -> npt.NDArray[np.bool_]:
    """Tokens with a label. In a sample without classes, nothing predicts the first one."""
    if not _has_token_labels(manifest):
        return np.zeros(arrays["input_ids"].shape, np.bool_)
    scored: npt.NDArray[np.bool_] = arrays[_LABELS] != IGNORE_INDEX
    if manifest.classes is None:
        scored[..., 0] = False
    return scored
