"""Reader of slices from data nodes, which serve other jobs as well.

Patience of a reader whose dataset isn't the one that the run began with, or can't be read.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import ray
from ray.exceptions import RayError

from hypha_ray.config import Job
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import OTHER_SAMPLES, other_dataset, whole
from hypha_ray.data.slices import UNREADABLE
from hypha_ray.errors import AuthenticationError, ClusterError, DataError, HyphaError, first_line
from hypha_ray.scheduler.runtime.data_nodes import LostReplica, Replica, look_up, replicas_of
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.supervised_actor import PULSE_S, value
from hypha_ray.types import SliceInfo

RETRY_S = 0.5
"""Seconds between two tries while nothing serves a slice."""
READS = 3
"""Reads of a slice from all data nodes, one after the other, before it counts as damaged."""
AWAY_S = 5.0
"""Seconds for which a data node that failed is asked last."""
MOST_DIVISIONS = 64
"""Most combinations of parts that are tried, if several datasets in parts are served under one name."""
LONGEST_PAUSE_S = 60.0
"""Longest pause between two look-ups for data nodes that are lost, while others serve."""


class ReaderPatience:
    """Limit of a wait, and its report to the user: each reason is reported once, until the wait has succeeded.

    Args:
        idle_s: longest wait, in seconds.
        report_problem: takes a line of text for the user.

    """

    def __init__(self, idle_s: float, report_problem: Callable[[str], None]) -> None:
        self.idle_s = idle_s
        self._report_problem = report_problem
        self._reported: set[str] = set()

    def deadline(self) -> float:
        """Monotonic time until which a wait that begins now may last."""
        return time.monotonic() + self.idle_s

    def tell(self, reason: str) -> None:
        """Report why the run waits, unless that was reported since the last success."""
        if reason not in self._reported:
            self._reported.add(reason)
            self._report_problem(f"{reason}; the run waits for it, {self.idle_s:g} s at most")

    def served(self) -> None:
        """Record a success: the same reasons are reported again later."""
        self._reported.clear()


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
        report_problem: takes a line of text about a data node that failed.
        identity: identity of the dataset that the run began with; None: it begins with what is served first.

    """

    def __init__(
        self,
        dataset: str,
        job: Job,
        actors: RunActors,
        report_problem: Callable[[str], None],
        identity: str | None = None,
    ) -> None:
        self._dataset = dataset
        self._run = str(job.run.name)
        self._identity = identity
        self._silence_s = job.lease_s
        self._patience = ReaderPatience(job.resources.max_idle_s, report_problem)
        self._actors = actors
        self._report_problem = report_problem
        self._nodes: dict[str, _Node] = {}
        """Data nodes with the samples that the run began with, by name."""
        self._others: dict[str, str] = {}
        """Identities of data nodes with other samples, by name."""
        self._known: set[str] = set()
        """Names of all data nodes that have served the run's samples."""
        self._refusals: dict[str, HyphaError] = {}
        """Reason of each data node that can't read its dataset, by name."""
        self._sites: Mapping[str, str] = {}
        self._manifest: Manifest | None = None
        self._slices: dict[int, SliceInfo] = {}
        """Slices that the run began with, by index."""
        self._bytes: Counter[str] = Counter()
        self._look_up_task: asyncio.Task[None] | None = None
        """Look-up beside reads, for data nodes that come back; None before the first."""
        self._look_up_at = 0.0
        self._pause_s = AWAY_S
        """Monotonic time of the next look-up beside reads, and the pause before the one after that."""

    async def manifest(self) -> Manifest:
        """Manifest of the dataset that the run began with; waits until a data node serves it."""
        deadline = self._patience.deadline()
        while self._manifest is None:
            try:
                await self._look()
            except (DataError, ClusterError) as error:
                if self._identity is None or time.monotonic() > deadline:
                    raise
                self._patience.tell(error.what)
                await asyncio.sleep(RETRY_S)
        self._patience.served()
        return self._manifest

    async def read(self, index: int, worker: int) -> Any:
        """Read a slice from the nearest data node that has it; waits until one serves it."""
        worker_node = await self._actors.node_of(worker)
        deadline = self._patience.deadline()
        reads = 0
        while True:
            self._look_for_lost()
            nodes = [node for node in self._nodes.values() if node.replica.has(index)]
            nodes.sort(key=lambda node: self._distance(node, worker_node))
            damages: list[DataError] = []
            for node in nodes:
                try:
                    tensors = await self._read_from(node, index)
                except DataError as damage:
                    damages += self._record_damage(node, damage, len(nodes) - 1)
                except (RayError, TimeoutError) as error:
                    self._record_failure(node, error, len(nodes) - 1)
                else:
                    self._patience.served()
                    return tensors
            if damages and len(damages) == len(nodes):
                reads += 1
            if reads >= READS:
                raise next((damage for damage in damages if damage.code == UNREADABLE), damages[0])
            self._require_hope(index, time.monotonic() > deadline)
            await asyncio.sleep(RETRY_S)
            await self._look_again()

    async def near(self, worker: int) -> frozenset[int]:
        """Slices that are served on a worker's node, or on its site."""
        worker_node = await self._actors.node_of(worker)
        manifest = await self.manifest()
        slices: set[int] = set()
        for node in self._nodes.values():
            if self._is_near(node.replica, worker_node):
                slices |= {info.index for info in manifest.slices if node.replica.has(info.index)}
        return frozenset(slices)

    def traffic(self) -> dict[str, int]:
        """Bytes read since the last call, by name of the data node."""
        counted = dict(self._bytes)
        self._bytes = Counter()
        return counted

    def _distance(self, node: _Node, worker_node: str | None) -> tuple[bool, bool, bool, int, str]:
        """Order of data nodes for a worker on a node."""
        is_away = time.monotonic() < node.away_until
        replica = node.replica
        is_elsewhere = replica.node_id != worker_node
        return is_away, is_elsewhere, not self._is_near(replica, worker_node), node.busy, replica.name

    def _is_near(self, replica: Replica, worker_node: str | None) -> bool:
        """Whether a data node is on the worker's node, or on its site."""
        if replica.node_id == worker_node:
            return True
        site = self._sites.get(worker_node or "")
        return site is not None and self._sites.get(replica.node_id) == site

    async def _read_from(self, node: _Node, index: int) -> Any:
        """Ask one data node for a slice, and ping it while it works.

        Raises:
            DataError: the slice is damaged there, or another one.
            RayError: the data node is dead, unreachable at this moment, or refuses.
            TimeoutError: it doesn't answer.

        """
        actor = node.replica.actor
        info = self._slices[index]
        tensors, receipt = actor.serve_to.options(num_returns=2).remote(self._run, index, info.sha256)
        answer = asyncio.ensure_future(value(receipt))
        node.busy += 1
        try:
            while not (await asyncio.wait({answer}, timeout=PULSE_S))[0]:
                pong = value(actor.ping.remote())
                await asyncio.wait_for(pong, self._silence_s)
            answer.result()
        finally:
            answer.cancel()
            node.busy -= 1
        node.away_until = 0.0
        name = node.replica.name
        self._refusals.pop(name, None)
        assert self._manifest is not None
        self._bytes[name] += info.samples * self._manifest.sample_bytes
        return tensors

    # ── data nodes that can't be read from ────────────────────────────────────────────────────────────────────────

    def _record_damage(self, node: _Node, damage: DataError, alternatives: int) -> list[DataError]:
        """Record a slice that a data node can't serve; return the error if the slice is damaged."""
        self._report(node, damage.what, alternatives)
        if damage.code != OTHER_SAMPLES:
            return [damage]
        self._avoid(node)
        return []

    def _record_failure(self, node: _Node, error: Exception, alternatives: int) -> None:
        """Record a data node that is dead or silent, or that can't read its dataset."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, HyphaError):
            self._refusals[node.replica.name] = cause
            reason = str(cause)
        elif isinstance(error, TimeoutError):
            reason = f"silent for {self._silence_s:g} s"
        else:
            reason = first_line(error)
        self._avoid(node)
        self._report(node, reason, alternatives)

    def _avoid(self, node: _Node) -> None:
        node.away_until = time.monotonic() + AWAY_S

    def _report(self, node: _Node, reason: str, alternatives: int) -> None:
        """Report a problem with a data node, and whether another one is read instead."""
        text = f"data node {node.replica.name} on {node.replica.address}: {reason}"
        if alternatives:
            text = f"{text}; another one is read from"
        self._report_problem(text)

    def _require_hope(self, index: int, is_late: bool) -> None:
        """Say that no data node serves a slice, and for how long the run waits.

        Raises:
            HyphaError: it has waited too long; or credentials are missing where nothing was ever read.

        """
        refusals = list(self._refusals.values())
        if len(refusals) >= len(self._nodes) and (is_late or not self._bytes):
            for refusal in refusals:
                if isinstance(refusal, AuthenticationError):
                    raise refusal
        if is_late:
            problem = f"no data node of {self._dataset!r} has served slice {index} for {self._patience.idle_s:g} s"
            raise ClusterError("DATA061", problem, self._states(), fix=self._remedy())
        self._patience.tell(f"no data node of {self._dataset!r} serves the run's samples ({self._states()})")

    def _states(self) -> str:
        """States of the data nodes, in words."""
        states: list[str] = []
        begun_with = str(self._identity)
        for name, identity in sorted(self._others.items()):
            states.append(f"{name} serves other samples now ({identity[:12]}, not {begun_with[:12]})")
        for name, error in sorted(self._refusals.items()):
            states.append(f"{name}: {error.what}")
        if states:
            return "; ".join(states)
        names = ", ".join(sorted(self._known))
        return f"none of {names}"

    def _remedy(self) -> str:
        if self._others:
            return "withdraw it, serve the former samples again, then submit again; other samples need another run.name"
        return "serve it again, then submit again"

    # ── look-ups ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _look(self) -> None:
        """Look data nodes up, keep those that serve the samples that the run began with, and learn the sites of nodes.

        Raises:
            DataError: at the first look there is no such dataset, or it isn't the one that the run began with.
            HyphaError: at the first look none of its data nodes serves it.

        """
        if self._manifest is None and self._identity is None:
            replicas = await asyncio.to_thread(replicas_of, self._dataset)
            self._begin(whole([replica.manifest for replica in replicas]))
        else:
            replicas, lost_replicas = await asyncio.to_thread(look_up, self._dataset)
            self._refusals = {replica.name: replica.error for replica in lost_replicas}
            if self._manifest is None:
                self._begin(_manifest_of(self._dataset, replicas, lost_replicas, str(self._identity)))
        nodes: dict[str, _Node] = {}
        self._others = {}
        for replica in replicas:
            if self._is_same(replica.manifest):
                nodes[replica.name] = self._node_of(replica)
            else:
                self._others[replica.name] = replica.manifest.identity
        self._known |= nodes.keys()
        self._nodes = nodes or self._nodes
        sites: dict[str, str] = {}
        for ray_node in await asyncio.to_thread(ray.nodes):
            if "site" in ray_node["Labels"]:
                sites[ray_node["NodeID"]] = ray_node["Labels"]["site"]
        self._sites = sites

    def _begin(self, manifest: Manifest) -> None:
        """Keep the slices of the dataset that the run is trained on."""
        self._manifest = manifest
        self._identity = manifest.identity
        self._slices = {info.index: info for info in manifest.slices}

    def _is_same(self, manifest: Manifest) -> bool:
        """Whether all slices of a manifest are those that the run began with; a part has some of them."""
        return all(_is_equal(info, self._slices.get(info.index)) for info in manifest.slices)

    def _node_of(self, replica: Replica) -> _Node:
        """State of a data node: that of before if it is the same actor, and not only one of the same name."""
        node = self._nodes.get(replica.name)
        if node is not None and node.replica.actor_id == replica.actor_id:
            return node
        return _Node(replica)

    def _look_for_lost(self) -> None:
        """Look data nodes up beside reads while some are lost, each time after a longer pause."""
        now = time.monotonic()
        missing = self._known - self._nodes.keys()
        if not missing and not any(node.away_until for node in self._nodes.values()):
            self._pause_s = AWAY_S
        elif now >= self._look_up_at and (self._look_up_task is None or self._look_up_task.done()):
            self._look_up_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._look_up_task = asyncio.ensure_future(self._look_again())

    async def _look_again(self) -> None:
        """Look data nodes up while they may be gone or restarting."""
        try:
            await self._look()
        except (RayError, HyphaError):  # The next look may find one; the caller counts the time.
            return


def _is_equal(info: SliceInfo, first_info: SliceInfo | None) -> bool:
    """Whether a slice is the one that the run began with, wherever its file is."""
    return first_info is not None and (info.sha256, info.samples, info.split) == (
        first_info.sha256,
        first_info.samples,
        first_info.split,
    )


def _manifest_of(
    dataset: str, replicas: Sequence[Replica], lost_replicas: Sequence[LostReplica], identity: str
) -> Manifest:
    """Find the manifest of a dataset by its identity; some of the data nodes may serve other samples.

    Raises:
        DataError: none serves it, or a part is missing.
        HyphaError: none answers.

    """
    if not replicas:
        raise lost_replicas[0].error
    undivided: dict[str, Manifest] = {}
    by_division: dict[int, dict[int, dict[str, Manifest]]] = {}
    """Manifests by number of parts, by part and by identity."""
    for replica in replicas:
        manifest = replica.manifest
        if manifest.part is None:
            undivided[manifest.identity] = manifest
        else:
            part, parts = manifest.part
            by_part = by_division.setdefault(parts, {})
            by_part.setdefault(part, {})[manifest.identity] = manifest
    candidates = list(undivided.values())
    for by_part in by_division.values():
        candidates += _combinations(by_part)
    for manifest in candidates:
        if manifest.identity == identity:
            return manifest
    raise other_dataset(dataset, {replica.manifest.identity for replica in replicas}, identity)


def _combinations(by_part: Mapping[int, Mapping[str, Manifest]]) -> list[Manifest]:
    """Datasets that the parts of a division make; there may be several of each part."""
    parts = [list(manifests.values()) for manifests in by_part.values()]
    return [whole(chosen) for chosen in islice(product(*parts), MOST_DIVISIONS)]
