"""Ray actors that serve a prepared dataset's slices: a shard to its own job, a data node to all jobs of a cluster."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property

import ray

from hypha_ray.config.schema import Testing
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import Arrays
from hypha_ray.data.storage.files import files_at
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
"""Reads that a data node, or a shard of a URL, works on at the same time."""


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
    """Serves one dataset. Several shards may serve the same one; each reads only the slices requested from it.

    The result of `read` goes to the object store once, and every reader on a node maps the same copy. Nothing is opened
    before the first call, so an unusable dataset raises a `DataError` instead of killing the actor.

    Args:
        place: folder on this actor's node, or URL, of a prepared dataset; no more, since Ray keeps arguments.
        testing: failpoints to arm.
        cache_gb: see `files_at`.

    """

    def __init__(self, place: str, testing: Testing | None = None, cache_gb: float | None = None) -> None:
        self._notes: list[str] = []
        self._files = files_at(place, cache_gb, self._notes.append)
        if testing is not None:
            arm(testing.failpoints, testing.failpoint_log)

    def announce(self) -> Manifest:
        """Announcement of this shard's dataset.

        Raises:
            DataError: the folder is missing, or contains no dataset or a damaged one.

        """
        return self._files.manifest()

    def read(self, index: int, fresh: bool = False) -> Arrays:
        """A slice's tensors, checked against the manifest at every call; if `fresh`, never from a cache.

        Raises:
            DataError: there is no such slice, or it is damaged.

        """
        info = self._slices.get(index)
        if info is None:
            manifest, allowed = self._files.manifest(), f"{len(self._slices)} slices"
            raise DataError("DATA008", f"dataset {manifest.name!r} has no such slice", str(index), allowed)
        return self._files.read(info, fresh)

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

    @ray.method(concurrency_group="pulse")
    def notes(self) -> list[str]:
        """Lines of text for the user since the last call."""
        told, self._notes[:] = list(self._notes), []
        return told

    @cached_property
    def _slices(self) -> dict[int, SliceInfo]:
        return {info.index: info for info in self._files.manifest().slices}


class DataNode(DataShard):
    """Serves a dataset to all jobs of a cluster, until its owner withdraws it.

    It is a detached actor on its owner's node. Its name in Ray is all that announces it.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place)
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
        manifest = self._files.manifest().model_dump_json()
        return Announcement(PROTOCOL, here.get_node_id(), ray.util.get_node_ip_address(), manifest, readers)

    def serve_to(self, run: str, index: int) -> tuple[Arrays, int]:
        """As `serve`, for a run of that name."""
        self._read_at[run] = time.monotonic()
        return self.serve(index)

    @ray.method(concurrency_group="check")
    def preprocessor(self) -> dict[str, bytes]:
        """Files of the dataset's tokenizer or image processor, by path in its folder."""
        return self._files.preprocessor()

    @ray.method(concurrency_group="check")
    def check(self) -> list[str]:
        """Read every slice, and return the problems found."""
        problems = []
        for index in self._slices:
            try:
                self.read(index, fresh=True)
            except DataError as error:
                problems.append(str(error))
        return problems
