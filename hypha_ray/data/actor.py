"""Ray actors that serve a prepared dataset's slices: a shard to its own job, a data node to all jobs of a cluster."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import ray

from hypha_ray.children import ListedActor
from hypha_ray.config.schema import Testing
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import other_slice
from hypha_ray.data.slices import Arrays
from hypha_ray.data.storage import files_at
from hypha_ray.errors import DataError, HyphaError
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.texts import counted
from hypha_ray.types import SliceInfo

PROTOCOL = 2
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

    `actor_id` is Ray's id of the actor: the name may be given to another one. `manifest` is the JSON of its dataset's
    manifest; `readers` are the runs that have read slices lately.
    """

    protocol: int
    actor_id: str
    node_id: str
    address: str
    manifest: str
    readers: tuple[str, ...]


class DataShard(ListedActor):
    """Serves one dataset. Several shards may serve the same one; each reads only the slices requested from it.

    The result of `read` goes to the object store once, and every reader on a node maps the same copy. Nothing is opened
    before the first call, so an unusable dataset raises a `DataError` instead of killing the actor.

    Args:
        address: folder on this actor's node, or URL, of a prepared dataset; no more, since Ray keeps arguments.
        testing: failpoints to arm.
        cache_gb: see `files_at`.

    """

    def __init__(self, address: str, testing: Testing | None = None, cache_gb: float | None = None) -> None:
        self._notes: list[str] = []
        self._indexed: tuple[Manifest, dict[int, SliceInfo]] | None = None
        """Manifest and its slices by index; None before the first request."""
        self._files = files_at(address, cache_gb, self._notes.append)
        if testing is not None:
            arm(testing.failpoints, testing.failpoint_log)

    def announce(self) -> Manifest:
        """Manifest of this shard's dataset, as it is now.

        Raises:
            DataError: the folder is missing, or contains no dataset or a damaged one.

        """
        return self._files.manifest(fresh=True)

    def read(self, index: int, fresh: bool = False, sha256: str | None = None) -> Arrays:
        """A slice's tensors, checked against the manifest at every call.

        Args:
            index: index of the slice.
            fresh: never take it from a cache.
            sha256: hash of the slice that the reader expects under that index; None: any slice.

        Raises:
            DataError: there is no such slice, or it is damaged; DATA046, it is another one now.

        """
        if sha256 is not None:
            self._require_same(index, sha256)
        slices = self._slices()
        info = slices.get(index)
        if info is None:
            problem = f"dataset {self._files.manifest().name!r} has no such slice"
            raise DataError("DATA008", problem, str(index), counted(len(slices), "slice"))
        try:
            return self._files.read(info, fresh)
        except DataError as damage:
            if sha256 is not None:
                self._explain(damage, index, sha256)
            raise

    def serve(self, index: int, sha256: str | None = None) -> tuple[Arrays, int]:
        """A slice's tensors, and its index as a receipt, so that a caller learns of success without the tensors.

        Call it with ``num_returns = 2``. For `sha256` see `read`.
        """
        failpoint("shard.read", index)
        return self.read(index, sha256=sha256), index

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """The process id: an answer shows that the actor lives."""
        return os.getpid()

    @ray.method(concurrency_group="pulse")
    def notes(self) -> list[str]:
        """Lines of text for the user since the last call."""
        notes = list(self._notes)
        self._notes.clear()
        return notes

    def _slices(self) -> dict[int, SliceInfo]:
        """Slices of the manifest that was read last, by index."""
        manifest = self._files.manifest()
        if self._indexed is None or self._indexed[0] is not manifest:
            self._indexed = manifest, {info.index: info for info in manifest.slices}
        return self._indexed[1]

    def _require_same(self, index: int, sha256: str) -> None:
        """Refuse to serve another slice than the one that a reader expects.

        The manifest is read again before that: the folder may have been put back since.
        """
        for fresh in (False, True):
            name = self._files.manifest(fresh).name
            info = self._slices().get(index)
            if info is not None and info.sha256 == sha256:
                return
        raise other_slice(name, index, None if info is None else info.sha256, sha256)

    def _explain(self, damage: DataError, index: int, sha256: str) -> None:
        """Raise the reason for damage that is a change: the folder was prepared anew since the manifest was read."""
        try:
            self._files.manifest(fresh=True)
        except HyphaError:  # Then no change is known.
            raise damage from None
        self._require_same(index, sha256)


class DataNode(DataShard):
    """Serves a dataset to all jobs of a cluster, until its owner withdraws it.

    It is a detached actor on its owner's node. Its name in Ray is all that announces it.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._read_at: dict[str, float] = {}
        """Monotonic time of each run's last read."""

    @ray.method(concurrency_group="pulse")
    def describe(self) -> Announcement:
        """Announcement of this node and its dataset.

        Raises:
            DataError: the folder is missing, or contains no dataset or a damaged one.

        """
        oldest_read = time.monotonic() - READING_S
        context = ray.get_runtime_context()
        readers = [run for run, read_s in self._read_at.items() if read_s >= oldest_read]
        return Announcement(
            protocol=PROTOCOL,
            actor_id=str(context.get_actor_id()),
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            manifest=self._files.manifest().model_dump_json(),
            readers=tuple(sorted(readers)),
        )

    def serve_to(self, run: str, index: int, sha256: str | None = None) -> tuple[Arrays, int]:
        """As `serve`, for a run of that name."""
        self._read_at[run] = time.monotonic()
        return self.serve(index, sha256)

    @ray.method(concurrency_group="check")
    def preprocessor(self) -> dict[str, bytes]:
        """Files of the dataset's tokenizer or image processor, by path in its folder."""
        return self._files.preprocessor()

    @ray.method(concurrency_group="check")
    def check(self) -> list[str]:
        """Read every slice, and return the problems found."""
        problems = []
        for index in self._slices():
            try:
                self.read(index, fresh=True)
            except DataError as error:
                problems.append(str(error))
        return problems
