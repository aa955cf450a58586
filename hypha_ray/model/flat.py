"""Flat arrays, and named tensors as views of them; needs numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.errors import CheckpointError
from hypha_ray.types import Entry, Flat, Layout
from hypha_ray.types.data import dtype_of

Array: TypeAlias = npt.NDArray[Any]
Groups: TypeAlias = Mapping[str, Array]
"""Arrays of a fragment by group, read-only."""


def empty(layout: Layout, fragment: int) -> Flat:
    """Return uninitialised arrays for a fragment, one a group."""
    return {group: np.empty(elements, dtype_of(group)) for group, elements in layout.groups(fragment).items()}


def view(entry: Entry, flat: Mapping[str, Array]) -> Array:
    """Return a tensor, in its shape, as a view of its fragment's arrays."""
    end = entry.offset + entry.size
    return flat[entry.group][entry.offset : end].reshape(entry.shape)


def views(layout: Layout, flats: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return all tensors by name, as views of their fragments' arrays; aliases of tied tensors are left out.

    Args:
        layout: places of the tensors.
        flats: arrays of fragment 0, 1, ….

    Raises:
        CheckpointError: the arrays don't fit the layout.

    """
    for fragment in range(layout.fragments):
        check(layout, fragment, flats[fragment])
    return {entry.name: view(entry, flats[entry.fragment]) for entry in layout.entries}


def pack(layout: Layout, fragment: int, tensors: Mapping[str, Array]) -> Flat:
    """Copy named tensors, such as a snapshot's, into new arrays: the inverse of `views`.

    Raises:
        CheckpointError: names or shapes of the tensors differ from the layout's.

    """
    check_names(layout, tensors)
    flat = empty(layout, fragment)
    for entry in layout.entries:
        if entry.fragment == fragment:
            view(entry, flat)[...] = tensors[entry.name]
    return flat


def check(layout: Layout, fragment: int, flat: Mapping[str, Array]) -> None:
    """Raise `CheckpointError` unless the arrays have the groups, dtypes and sizes of a fragment."""
    expected_forms = {group: (dtype_of(group), (elements,)) for group, elements in layout.groups(fragment).items()}
    got = {group: (array.dtype.name, array.shape) for group, array in flat.items()}
    if got != expected_forms:
        problem = f"weights of fragment {fragment} don't fit the model"
        raise CheckpointError("MODEL010", problem, str(got), str(expected_forms))


def check_names(layout: Layout, tensors: Mapping[str, Array]) -> None:
    """Raise `CheckpointError` unless the tensors have the layout's names and shapes."""
    shapes = {entry.name: entry.shape for entry in layout.entries}
    mismatched_names = [name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape]
    missing_names = sorted(shapes.keys() - tensors.keys())
    unknown_names = sorted(tensors.keys() - shapes.keys())
    problems: list[str] = []
    for fault, names in (
        ("missing", missing_names),
        ("unknown", unknown_names),
        ("of another shape", mismatched_names),
    ):
        if names:
            examples = ", ".join(names[:3])
            problems.append(f"{len(names)} {fault} ({examples})")
    if problems:
        fix = "use the job file that they were made with"
        raise CheckpointError("MODEL010", "weights don't fit the model", "; ".join(problems), fix=fix)
