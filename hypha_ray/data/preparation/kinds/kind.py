"""Contract of a kind of dataset of the package: its writer, and what the manifest tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hypha_ray.data.manifest import Modality, PreprocessorInfo
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import Report, SliceWriter
from hypha_ray.data.provenance import Account

Write: TypeAlias = Callable[[Options, SliceWriter, Report, Account], PreprocessorInfo | None]
"""Function that writes the slices of both splits, and the preprocessor beside them; it returns None without one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of dataset."""

    write: Write
    modality: Modality | None
    """Modality of the dataset; None: its tensors tell."""
    used: str
    """Columns that are used, with a verb, for the account."""
