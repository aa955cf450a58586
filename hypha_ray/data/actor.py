"""The data shard: the Ray actor that serves a prepared dataset's slices."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import ray

from hypha_ray.config.schema import Testing
from hypha_ray.data.catalogue import load
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.errors import DataError
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.types import SliceInfo


class DataShard:
    """Serves one folder. Several shards may serve the same folder; each reads only the slices requested from it.

    The result of `read` goes to the object store once, and every reader on a node maps the same copy. Nothing is opened
    before the first call, so an unusable dataset raises a `DataError` instead of killing the actor.

    Args:
        folder: a prepared dataset, on this actor's node; only its path, since Ray keeps constructor arguments.
        testing: failpoints to arm.

    """

    def __init__(self, folder: str, testing: Testing | None = None) -> None:
        self._folder = Path(folder).expanduser()
        if testing is not None:
            arm(testing.failpoints, testing.failpoint_log)

    def announce(self) -> Manifest:
        """Announcement of this shard's dataset.

        Raises:
            DataError: the folder is missing, or contains no dataset or a damaged one.

        """
        return self._manifest

    def read(self, index: int) -> Arrays:
        """A slice's tensors, checked against the manifest at every call.

        Raises:
            DataError: there is no such slice, or it is damaged.

        """
        info = self._slices.get(index)
        if info is None:
            allowed = f"{len(self._slices)} slices"
            raise DataError("DATA008", f"dataset {self._manifest.name!r} has no such slice", str(index), allowed)
        return read_slice(self._folder, info, self._manifest)

    def serve(self, index: int) -> tuple[Arrays, int]:
        """A slice's tensors, and its index as a receipt, so that a caller learns of success without the tensors.

        Call it with ``num_returns = 2``.
        """
        failpoint("shard.read", index)
        return self.read(index), index

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """The process id: an answer shows that the actor lives."""
        return os.getpid()

    @cached_property
    def _manifest(self) -> Manifest:
        return load(self._folder)

    @cached_property
    def _slices(self) -> dict[int, SliceInfo]:
        return {info.index: info for info in self._manifest.slices}
