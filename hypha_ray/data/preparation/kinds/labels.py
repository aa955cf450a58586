"""Labels of samples as numbers: one class, or marks for several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hypha_ray.data.preparation.sources.labelled import Label


def class_names(labels: Iterable[Label], known: Sequence[str]) -> tuple[str, ...]:
    """Names of all classes, by number: those known, otherwise whole numbers by size and texts by alphabet."""
    if known:
        return tuple(known)
    names = {name for label in labels for name in ([label] if isinstance(label, str) else label)}
    whole = all(name.lstrip("-").isdecimal() for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if whole else None))


def numbered(label: Label, numbers: Mapping[str, int]) -> npt.NDArray[np.generic]:
    """The number of a class, int32 []; of several classes 1 for each one that is there, uint8 [C]."""
    if isinstance(label, str):
        return np.array(numbers[label], np.int32)
    return np.array([name in label for name in numbers], np.uint8)
