"""Labels of samples as numbers: one class, or marks for several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hypha_ray.data.manifest import ClassInfo
from hypha_ray.data.preparation.sources.labelled import Label
from hypha_ray.errors import DataError


def classes_of(labels: Iterable[Label], known: Sequence[str], several: bool, source: str) -> ClassInfo:
    """Classes of a source with their names by number.

    Args:
        labels: label of each sample.
        known: names that the source has for its classes; empty without.
        several: whether a sample may have several classes.
        source: name of the source, for the error.

    Raises:
        DataError: all samples have the same label, so that there is nothing to learn.

    """
    marks = {frozenset([label] if isinstance(label, str) else label) for label in labels}
    names = {name for mark in marks for name in mark}
    if len(marks if several else names) < 2:
        only = ", ".join(map(repr, sorted(names))) or "none"
        raise _the_same(source, only, "at least two classes", "add samples of other classes")
    return ClassInfo(tuple(known) if known else _by_number(names), several)


def require_different(numbers: Iterable[float], source: str) -> None:
    """Check that numbers to predict aren't all the same.

    Raises:
        DataError: they are, so that there is nothing to learn.

    """
    found = set(numbers)
    if len(found) < 2:
        raise _the_same(source, f"{found.pop():g}", "different numbers", "name another --label-column")


def _the_same(source: str, got: str, allowed: str, fix: str) -> DataError:
    return DataError("DATA039", f"all labels in {source} are the same", got, allowed, fix)


def _by_number(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes by number: whole numbers by size, texts by alphabet."""
    names = list(names)
    whole = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if whole else None))


def numbered(label: Label, numbers: Mapping[str, int]) -> npt.NDArray[np.generic]:
    """The number of a class, int32 []; of several classes 1 for each one that is there, uint8 [C]."""
    if isinstance(label, str):
        return np.array(numbers[label], np.int32)
    return np.array([name in label for name in numbers], np.uint8)
