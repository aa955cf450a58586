"""Reader of slices from data nodes, which serve other jobs as well."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from hypha_ray.config import Job
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import whole
from hypha_ray.data.slices import UNREADABLE
from hypha_ray.errors import ClusterError, DataError, HyphaError, first_line
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.slices.data_nodes import Replica, look_up, replicas_of
from hypha_ray.scheduler.runtime.supervised_actor import PULSE_S, value

READS = 3
"""Reads of a slice from all data nodes, one after the other, before it counts as damaged."""
AWAY_S = 5.0
"""Seconds for which a data node that failed is asked last."""
RETRY_S = 0.5
"""Seconds between two tries while no data node answers."""


@dataclass
class _Node:
    """State of a data node in this reader."""

    replica: Replica
    busy: int = 0
    """Number of reads in progress."""
    away_until: float = 0.0
    """Monotonic time until which other data nodes are preferred."""


class ReplicaReader:
    """Reads from the data nodes of a dataset: from the nearest, and from another one if that is dead or damaged.

    Near means on the worker's node, then on its site (label `site` of Ray's nodes), then the least busy. A dataset that
    no data node serves any more is waited for; Ray restarts data nodes whose process died.

    Args:
        dataset: name of the dataset.
        job: the job file.
        actors: actors of the run, which know the nodes of workers.
        problem: takes a line of text about a data node that failed.

    """

    def __init__(self, dataset: str, job: Job, actors: RunActors, problem: Callable[[str], None]) -> None:
        self._dataset, self._run = dataset, str(job.run.name)
        self._silence_s, self._idle_s = job.lease_s, job.resources.max_idle_s
        self._actors, self._problem = actors, problem
        self._nodes: dict[str, _Node] = {}
        self._sites: Mapping[str, str] = {}
        self._manifest: Manifest | None = None
        self._identities: set[str] = set()
        """Identities of the dataset or of its parts."""
        self._sizes: dict[int, int] = {}
        """Bytes of each slice."""
        self._bytes: Counter[str] = Counter()

    async def manifest(self) -> Manifest:
        """See `SliceReader` of `slice_readers`."""
        if self._manifest is None:
            await self._look()
        assert self._manifest is not None
        return self._manifest

    async def read(self, index: int, worker: int) -> Any:
        """See `SliceReader` of `slice_readers`."""
        place, idle_until, reads = await self._actors.node_of(worker), time.monotonic() + self._idle_s, 0
        while True:
            asked = sorted(
                (node for node in self._nodes.values() if node.replica.has(index)),
                key=lambda node: self._distance(node, place),
            )
            damages: list[DataError] = []
            for node in asked:
                try:
                    return await self._read_from(node, index)
                except DataError as damage:
                    damages.append(damage)
                    self._tell(node, damage.what)
                except (RayError, TimeoutError) as error:
                    node.away_until = time.monotonic() + AWAY_S
                    self._tell(node, first_line(error))
            reads += bool(damages) and len(damages) == len(asked)
            if reads >= READS:
                raise next((damage for damage in damages if damage.code == UNREADABLE), damages[0])
            if time.monotonic() > idle_until:
                got, fix = f"none of {', '.join(self._nodes)}", "serve it again, then submit again"
                what = f"no data node of {self._dataset!r} has served slice {index} for {self._idle_s:g} s"
                raise ClusterError("DATA061", what, got, fix=fix)
            await asyncio.sleep(RETRY_S)
            await self._look_again()

    async def near(self, worker: int) -> frozenset[int]:
        """Slices that are served on a worker's node, or on its site."""
        place, manifest = await self._actors.node_of(worker), await self.manifest()
        close = [one.replica for one in self._nodes.values() if self._is_near(one.replica, place)]
        return frozenset(info.index for info in manifest.slices if any(one.has(info.index) for one in close))

    def traffic(self) -> dict[str, int]:
        """See `SliceReader` of `slice_readers`."""
        counted, self._bytes = dict(self._bytes), Counter()
        return counted

    def _distance(self, node: _Node, place: str | None) -> tuple[bool, bool, bool, int, str]:
        """Order of data nodes for a worker on a node."""
        away, replica = time.monotonic() < node.away_until, node.replica
        return away, replica.node_id != place, not self._is_near(replica, place), node.busy, replica.name

    def _is_near(self, replica: Replica, place: str | None) -> bool:
        """Whether a data node is on this node, or on its site."""
        site = self._sites.get(place or "")
        return replica.node_id == place or (site is not None and self._sites.get(replica.node_id) == site)

    async def _read_from(self, node: _Node, index: int) -> Any:
        """Ask one data node for a slice, and ping it while it works.

        Raises:
            DataError: the slice is damaged there.
            RayError: the data node is dead, or unreachable at this moment.
            TimeoutError: it doesn't answer.

        """
        actor = node.replica.actor
        tensors, receipt = actor.serve_to.options(num_returns=2).remote(self._run, index)
        answer = asyncio.ensure_future(value(receipt))
        node.busy += 1
        try:
            while not (await asyncio.wait({answer}, timeout=PULSE_S))[0]:
                await asyncio.wait_for(value(actor.ping.remote()), self._silence_s)
            answer.result()
        finally:
            answer.cancel()
            node.busy -= 1
        node.away_until = 0.0
        self._bytes[node.replica.name] += self._sizes[index]
        return tensors

    async def _look(self) -> None:
        """Look data nodes up, keep those that serve the samples of the first look, and learn the sites of nodes."""
        if self._manifest is None:
            found = await asyncio.to_thread(replicas_of, self._dataset)
            self._manifest = whole([one.manifest for one in found])
            self._identities = {one.manifest.identity for one in found}
            per_sample = self._manifest.sample_bytes
            self._sizes = {info.index: info.samples * per_sample for info in self._manifest.slices}
        else:
            found, _ = await asyncio.to_thread(look_up, self._dataset)
        same = [one for one in found if one.manifest.identity in self._identities]
        self._nodes = {one.name: self._nodes.get(one.name) or _Node(one) for one in same} or self._nodes
        nodes = await asyncio.to_thread(ray.nodes)
        self._sites = {node["NodeID"]: node["Labels"]["site"] for node in nodes if "site" in node["Labels"]}

    async def _look_again(self) -> None:
        """As `_look`, at a time when data nodes may be gone or restarting."""
        try:
            await self._look()
        except (RayError, HyphaError):  # The next look may find one; the caller counts the time.
            return

    def _tell(self, node: _Node, reason: str) -> None:
        self._problem(f"data node {node.replica.name} on {node.replica.address}: {reason}; another one is read from")
