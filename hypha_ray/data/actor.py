"""Ray actors that serve a prepared dataset's slices: a shard to its own job, a data node to all jobs of a cluster."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ray

from hypha_ray.config.schema import Testing
from hypha_ray.data.catalogue import load
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.preprocessor_files import preprocessor_files
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.errors import DataError
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.types import SliceInfo

PROTOCOL = 1
"""Version of a data node's methods and messages; a job refuses a data node of another one."""
READING_S = 60.0
"""Seconds after its last read for which a run counts as a reader."""
NODE_GROUPS = {"pulse": 1, "check": 1}
"""Concurrency groups of a data node: a long check holds up no read."""
READS_AT_ONCE = 4
"""Reads that a data node works on at the same time, for several jobs or workers."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Description of a data node, as it gives it itself.

    `manifest` is the JSON of its dataset's manifest; `readers` are the runs that have read slices lately.
    """

    protocol: int
    node_id: str
    address: str
    manifest: str
    readers: tuple[str, ...]


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


class DataNode(DataShard):
    """Serves a dataset to all jobs of a cluster, until its owner withdraws it.

    It is a detached actor on its owner's node. Its name in Ray is all that announces it.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._read_at: dict[str, float] = {}
        """Monotonic time of each run's last read."""

    @ray.method(concurrency_group="pulse")
    def describe(self) -> Announcement:
        """Announcement of this node and its dataset.

        Raises:
            DataError: the folder is missing, or contains no dataset or a damaged one.

        """
        since, here = time.monotonic() - READING_S, ray.get_runtime_context()
        readers = tuple(sorted(run for run, at in self._read_at.items() if at >= since))
        manifest = self._manifest.model_dump_json()
        return Announcement(PROTOCOL, here.get_node_id(), ray.util.get_node_ip_address(), manifest, readers)

    def serve_to(self, run: str, index: int) -> tuple[Arrays, int]:
        """As `serve`, for a run of that name."""
        self._read_at[run] = time.monotonic()
        return self.serve(index)

    @ray.method(concurrency_group="pulse")
    def preprocessor(self) -> dict[str, bytes]:
        """Files of the dataset's tokenizer or image processor, by path in its folder."""
        return preprocessor_files(self._folder)

    @ray.method(concurrency_group="check")
    def check(self) -> list[str]:
        """Read every slice, and return the problems found."""
        problems = []
        for index in self._slices:
            try:
                self.read(index)
            except DataError as error:
                problems.append(str(error))
        return problems
