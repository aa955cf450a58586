"""Readers of slices: from shards of the run, or from data nodes that other people's jobs read from, too.

SliceCache ──read(index, worker)──► ShardReader ────► shard-n, on this node
                               └──► ReplicaReader ──► data/<dataset>/<node>, the nearest that answers
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from hypha_ray.config import Job
from hypha_ray.data.files import Place, is_url
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import UNREADABLE
from hypha_ray.errors import ClusterError, DataError, HyphaError, first_line
from hypha_ray.scheduler.runtime.data_nodes import Replica, look_up, replicas_of
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.supervised_actor import PULSE_S, SupervisedActor, value

READS = 3
"""Reads of a slice, from one shard after the other, before it counts as damaged."""
AWAY_S = 5.0
"""Seconds for which a data node that failed is asked last."""
RETRY_S = 0.5
"""Seconds between two tries while no data node answers."""


class SliceReader(Protocol):
    """Reads slices of the run's dataset."""

    async def manifest(self) -> Manifest:
        """Manifest of the dataset.

        Raises:
            HyphaError: it is missing or damaged, or can't be reached.

        """

    async def read(self, index: int, worker: int) -> Any:
        """Read a slice for a worker of that number; return a reference to its tensors.

        Raises:
            HyphaError: every read found the slice damaged, or it can't be read.

        """

    def traffic(self) -> dict[str, int]:
        """Bytes of slices read since the last call, by name of the data node; empty without data nodes."""


def reader_of(dataset: Place, job: Job, actors: RunActors, problem: Callable[[str], None]) -> SliceReader:
    """The reader for a dataset's place; `problem` takes lines of text for the user."""
    if dataset.served:
        return ReplicaReader(dataset.where, job, actors, problem)
    if is_url(dataset.where):
        return UrlReader(dataset.where, actors, problem)
    return ShardReader(actors.shards)


class ShardReader:
    """Reads from the shards of the run, by turns."""

    def __init__(self, shards: Sequence[SupervisedActor]) -> None:
        self._shards = shards

    async def manifest(self) -> Manifest:
        """See `SliceReader`."""
        announced = await self._shards[0].ask(lambda shard: shard.announce.remote())
        manifest: Manifest = await announced
        return manifest

    async def read(self, index: int, worker: int) -> Any:
        """See `SliceReader`."""
        return await _served(self._shards, index)

    def traffic(self) -> dict[str, int]:
        """See `SliceReader`."""
        return {}


class UrlReader:
    """Reads a URL on the nodes of workers, each of which keeps on its disk what it has fetched.

    A slice is fetched by the node of the worker that was the first to need it. Later readers get it from there, so each
    slice leaves its source once, as long as caches are large enough.

    Args:
        url: folder of the dataset.
        actors: actors of the run, which start shards and know the nodes of workers.
        problem: takes a line of text for the user.

    """

    def __init__(self, url: str, actors: RunActors, problem: Callable[[str], None]) -> None:
        self._url, self._actors, self._problem = url, actors, problem
        self._shards: dict[str | None, SupervisedActor] = {}
        """Shard of each node that has one; None: of this node."""
        self._nodes: dict[int, str | None] = {}
        """Node that has fetched each slice."""

    async def manifest(self) -> Manifest:
        """See `SliceReader`."""
        return await ShardReader([self._shard(None)]).manifest()

    async def read(self, index: int, worker: int) -> Any:
        """See `SliceReader`."""
        if index not in self._nodes:
            self._nodes[index] = await self._actors.node_of(worker)
        shard = self._shard(self._nodes[index])
        tensors = await _served([shard], index)
        for text in await (await shard.ask(lambda one: one.notes.remote())):
            self._problem(text)
        return tensors

    def traffic(self) -> dict[str, int]:
        """See `SliceReader`."""
        return {}

    def _shard(self, node: str | None) -> SupervisedActor:
        if node not in self._shards:
            self._shards[node] = self._actors.shard_near(node, self._url)
        return self._shards[node]


async def _served(shards: Sequence[SupervisedActor], index: int) -> Any:
    """Reference to a slice's tensors, which one shard after the other is asked for.

    Raises:
        HyphaError: every read found the slice damaged, or it can't be read.

    """
    for attempt in range(READS):
        shard = shards[(index + attempt) % len(shards)]
        try:
            tensors, _ = await shard.ask(lambda s: s.serve.options(num_returns=2).remote(index))
            return tensors
        except DataError as error:
            damage = error
    raise damage


@dataclass
class _Node:
    """A data node, as this reader knows it."""

    replica: Replica
    busy: int = 0
    """Reads that it has been asked for and that it works on."""
    away_until: float = 0.0
    """Monotonic time until which it is asked last."""


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
        self._sizes: dict[int, int] = {}
        """Bytes of each slice."""
        self._bytes: Counter[str] = Counter()

    async def manifest(self) -> Manifest:
        """See `SliceReader`."""
        if self._manifest is None:
            await self._look()
        assert self._manifest is not None
        return self._manifest

    async def read(self, index: int, worker: int) -> Any:
        """See `SliceReader`."""
        place, idle_until, reads = await self._actors.node_of(worker), time.monotonic() + self._idle_s, 0
        while True:
            asked = sorted(self._nodes.values(), key=lambda node: self._distance(node, place))
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
            reads += len(damages) == len(asked)
            if reads >= READS:
                raise next((damage for damage in damages if damage.code == UNREADABLE), damages[0])
            if time.monotonic() > idle_until:
                got, fix = f"none of {', '.join(self._nodes)}", "serve it again, then submit again"
                what = f"no data node of {self._dataset!r} has served slice {index} for {self._idle_s:g} s"
                raise ClusterError("DATA061", what, got, fix=fix)
            await asyncio.sleep(RETRY_S)
            await self._look_again()

    def traffic(self) -> dict[str, int]:
        """See `SliceReader`."""
        counted, self._bytes = dict(self._bytes), Counter()
        return counted

    def _distance(self, node: _Node, place: str | None) -> tuple[bool, bool, bool, int, str]:
        """Order of data nodes for a worker on a node."""
        site = self._sites.get(place or "")
        same_site = site is not None and self._sites.get(node.replica.node_id) == site
        away = time.monotonic() < node.away_until
        return away, node.replica.node_id != place, not same_site, node.busy, node.replica.name

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
            self._manifest = found[0].manifest
            per_sample = self._manifest.sample_bytes
            self._sizes = {info.index: info.samples * per_sample for info in self._manifest.slices}
        else:
            found, _ = await asyncio.to_thread(look_up, self._dataset)
        same = [one for one in found if one.manifest.identity == self._manifest.identity]
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
