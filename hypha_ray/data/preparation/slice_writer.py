"""Writer of slices, which counts what it has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from hypha_ray.data.manifest import ClassInfo, TensorInfo, TokenRules
from hypha_ray.data.slices import Arrays, describe, merge, write_slice
from hypha_ray.types import SliceInfo

Report: TypeAlias = Callable[[str, int], None]
"""Receives the progress since the last call: ``("documents", 12)`` or ``("samples", 1024)``."""


class SliceWriter:
    """Writes samples as slices and records them.

    Args:
        folder: folder of the dataset, which preprocessors are saved in too.
        samples_per_slice: samples of a slice.
        report: receives the progress.
        first: number of the first slice.
        written: takes the file of each slice, to move it elsewhere.

    """

    def __init__(
        self,
        folder: Path,
        samples_per_slice: int,
        report: Report,
        first: int = 0,
        written: Callable[[Path], None] = lambda file: None,
    ) -> None:
        self.folder = folder
        self._first = first
        self._written = written
        self.slices: list[SliceInfo] = []
        self.tensors: tuple[TensorInfo, ...] = ()
        self.classes: ClassInfo | None = None
        self.tokens: TokenRules | None = None
        self._size = samples_per_slice
        self._report = report

    def add(self, arrays: Arrays, split: str) -> None:
        """Write samples; only the last slice may be shorter."""
        samples = len(next(iter(arrays.values())))
        for start in range(0, samples, self._size):
            part = {name: array[start : start + self._size] for name, array in arrays.items()}
            info = write_slice(self.folder, self._first + len(self.slices), split, part)
            self._written(self.folder / info.file)
            _, found = describe(part, info.file)
            self.tensors = merge(self.tensors or found, found, info.file)
            self.slices.append(info)
            self._report("samples", info.samples)
