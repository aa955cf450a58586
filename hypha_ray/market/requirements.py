"""Needs of a job's actors, and whether the cluster's nodes satisfy them.

Needs become bundles of placement groups, one group for each actor. `shortage` packs them onto the nodes beforehand and
says in a user's words what is missing; Ray itself would only wait.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hypha_ray.config import Job
from hypha_ray.config.tables.resources import WorkerGroup, WorkerResources
from hypha_ray.errors import CapacityError, ConfigError

GB = 1_000_000_000
OWN_LABEL = "gpu_type"
RAY_LABEL = "ray.io/accelerator-type"
"""The labels that name a node's GPU: the one its owner gives, and the one that Ray finds out by itself."""
ID_LABEL = "ray.io/node-id"
"""The label in which Ray gives each node its id."""
NOT_NVIDIA = re.compile(r"AMD-|Intel-|MXC|Apple-|M\d")
"""Beginnings of Ray's names of GPUs of other vendors; NVIDIA's have no prefix."""
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class NodeResources:
    """A node's address, what it has in all and free, in Ray's resource names and units, and its labels."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Ray's id of the node, or its address without one."""
        return self.labels.get(ID_LABEL, self.address)


Room: TypeAlias = tuple[NodeResources, Mapping[str, float]]
"""Node, and what is left there."""


@dataclass(frozen=True, slots=True)
class Need:
    """Needs of one actor on one node; `gpu_type` is ``nvidia``, ``amd``, or what a label says."""

    role: str
    cpu: float = 0.0
    gpu: float = 0.0
    memory_bytes: int = 0
    gpu_type: str | None = None

    def bundle(self) -> dict[str, float]:
        """The placement group's bundle; empty if the actor reserves nothing."""
        amounts = {"CPU": self.cpu, "GPU": self.gpu, "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in amounts.items() if amount > 0}

    def __str__(self) -> str:
        amounts = ((self.cpu, "CPU"), (self.gpu, "GPU"), (self.memory_bytes / GB, "GB of memory"))
        found = [f"{amount:g} {unit}" for amount, unit in amounts if amount > 0] or ["no reservation"]
        return ", ".join(found if self.gpu_type is None else [*found, f"gpu_type {self.gpu_type}"])

    def selector(self, nodes: Sequence[NodeResources]) -> dict[str, str]:
        """The bundle's label selector: by the owners' label, or by Ray's where only that names the type."""
        if self.gpu_type is None:
            return {}
        key, values = self._label(self.gpu_type, nodes)
        return {key: f"in({','.join(sorted(values))})"}

    def admits(self, nodes: Sequence[NodeResources]) -> list[bool]:
        """Which of the nodes the selector takes."""
        if self.gpu_type is None:
            return [True] * len(nodes)
        key, values = self._label(self.gpu_type, nodes)
        return [node.labels.get(key) in values for node in nodes]

    @staticmethod
    def _label(gpu_type: str, nodes: Sequence[NodeResources]) -> tuple[str, set[str]]:
        own = any(node.labels.get(OWN_LABEL) == gpu_type for node in nodes)
        found = {node.labels[RAY_LABEL] for node in nodes if gpu_type in _ray_types(node)}
        return (RAY_LABEL, found) if found and not own else (OWN_LABEL, {gpu_type})


@dataclass(frozen=True, slots=True)
class Shortage:
    """Reason that not all actors fit: for `short` of the `wanted` ones with this need there is no node."""

    need: Need
    wanted: int
    short: int
    busy: bool
    """The nodes would have room if they were idle."""
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.short} of {self.wanted} short"

    def error(self) -> CapacityError:
        """The same for the user."""
        state, fix = ("busy", "wait for other jobs") if self.busy else ("too small", "ask for less in [resources]")
        return CapacityError("CFG004", f"the cluster is {state}: {self}", fix=f"{fix}, or add nodes")


def group_need(group: WorkerGroup) -> Need:
    """Needs of a worker of the group; empty if its trainer dials in from elsewhere."""
    return Need("worker") if group.dials_in else _need("worker", group)


def worker_needs(job: Job) -> list[Need]:
    """Needs of each worker, in the order of their numbers."""
    return [need for group in job.worker_groups for need in [group_need(group)] * group.count]


def server_need(job: Job) -> Need:
    """Needs of one parameter server."""
    return _need("server", job.resources.parameter_server)


def needs(job: Job, workers: int) -> dict[Need, int]:
    """Needs of that many workers and all parameter servers, each with its count."""
    wanted = Counter(worker_needs(job)[:workers])
    return {**wanted, server_need(job): job.sync.fragments}


def workers_to_start(job: Job, nodes: Sequence[NodeResources]) -> list[int]:
    """Numbers of the workers that find room now beside the parameter servers; earlier groups come first.

    Raises:
        CapacityError: not even `min_workers` do.

    """
    chosen = {server_need(job): job.sync.fragments}
    numbers = list[int]()
    first = 0
    for group in job.worker_groups:
        need = group_need(group)
        fitting = _most({need: 0, **chosen}, need, group.count, nodes)
        chosen[need] = chosen.get(need, 0) + fitting
        numbers += range(first, first + fitting)
        first += group.count
    least = min(job.resources.min_workers, job.num_workers)
    if len(numbers) < least and (missing := shortage(needs(job, least), nodes)):
        raise missing.error()
    return numbers


def _most(chosen: Mapping[Need, int], need: Need, count: int, nodes: Sequence[NodeResources]) -> int:
    """The most workers of one need, `count` at most, that fit beside what is chosen."""

    def fits(more: int) -> bool:
        return shortage({**chosen, need: chosen[need] + more}, nodes) is None

    larger = {one: wanted for one, wanted in chosen.items() if _size(one) > _size(need)}
    while count > 0 and (missing := shortage({**larger, need: chosen[need] + count}, nodes)) is not None:
        count = count - missing.short if missing.need == need else 0
    # Smaller needs take few of the places that are left, so the search goes down from there in growing steps.
    least = count
    step = 1
    while least > 0 and not fits(least):
        count = least - 1
        least = least - step
        step = 2 * step
    least = max(0, least)
    return least + bisect_left(range(least + 1, count + 1), True, key=lambda more: not fits(more))


def shortage(wanted: Mapping[Need, int], nodes: Sequence[NodeResources]) -> Shortage | None:
    """First shortage of the nodes as they are now; None if all needs fit.

    First fit, the largest need first: exact for equal needs, and for one kind beside others that reserve nothing.
    """
    in_all = _pack(wanted, nodes, [node.total for node in nodes], busy=False)
    return in_all or _pack(wanted, nodes, [node.free for node in nodes], busy=True)


def nearest(need: Need, nodes: Sequence[NodeResources]) -> NodeResources | None:
    """Node that comes closest to having room; None if the need admits none of them."""
    rooms = [(node, node.free) for node, admits in zip(nodes, need.admits(nodes), strict=True) if admits]
    return _closest(need, rooms)[0] if rooms else None


def _pack(
    wanted: Mapping[Need, int], nodes: Sequence[NodeResources], room: Sequence[Mapping[str, float]], busy: bool
) -> Shortage | None:
    left = [dict(amounts) for amounts in room]
    for need in sorted(wanted, key=_size, reverse=True):
        admitted = [index for index, admits in enumerate(need.admits(nodes)) if admits]
        short = wanted[need]
        bundle = need.bundle()
        for index in admitted:
            if not short:
                break
            count = min(short, _times_in(bundle, left[index]))
            for name, amount in bundle.items():
                left[index][name] = left[index].get(name, 0.0) - count * amount
            short -= count
        if short > 0:
            rooms = [(nodes[index], left[index]) for index in admitted]
            return Shortage(need, wanted[need], short, busy, _lack(need, rooms) if rooms else _no_node(need, nodes))
    return None


def _size(need: Need) -> tuple[float, ...]:
    """Order in which needs are packed, the largest first."""
    return need.gpu, need.memory_bytes, need.cpu


def times_in(need: Need, amounts: Mapping[str, float]) -> int:
    """Number of times that a need fits, counted in ten-thousandths as Ray does."""
    return _times_in(need.bundle(), amounts)


def _times_in(bundle: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    fits = (_units(amounts.get(name, 0.0)) // max(1, _units(amount)) for name, amount in bundle.items())
    return min(fits, default=sys.maxsize)


def _units(amount: float) -> int:
    return max(0, round(amount * 1e4))


def _lack(need: Need, rooms: Sequence[Room]) -> str:
    """Lack of the node that comes closest."""
    node, left = _closest(need, rooms)
    resource = _gaps(need, left)[0][1]
    size, unit = (GB, "GB of memory") if resource == "memory" else (1, resource)
    asked, rest, total = (
        f"{max(0.0, round(amounts.get(resource, 0.0) / size, 4)):g}" for amounts in (need.bundle(), left, node.total)
    )
    return f"{asked} {unit} per {need.role} is needed; the closest node, {node.address}, has {rest} of its {total} left"


def _closest(need: Need, rooms: Sequence[Room]) -> Room:
    """Node that comes closest: fewest resources short, then the smallest gap, then the most in all."""

    def distance(room: Room) -> tuple[float, ...]:
        gaps = _gaps(need, room[1])
        return (len(gaps), gaps[0][0], -room[0].total.get(gaps[0][1], 0.0)) if gaps else (0,)

    return min(rooms, key=distance)


def _gaps(need: Need, left: Mapping[str, float]) -> list[tuple[float, str]]:
    """Parts of the needed amounts that are missing, each with its resource, the largest first."""
    lacks = ((1 - left.get(name, 0.0) / amount, name) for name, amount in need.bundle().items())
    return sorted(((gap, name) for gap, name in lacks if gap > 0), reverse=True)


def _no_node(need: Need, nodes: Sequence[NodeResources]) -> str:
    types = sorted({node.labels[key] for node in nodes for key in (OWN_LABEL, RAY_LABEL) if key in node.labels})
    there = f"the labels there: {', '.join(types)}" if types else f"no node has a label {OWN_LABEL} or {RAY_LABEL}"
    return f"no node has gpu_type {need.gpu_type} for a {need.role}; {there}" if nodes else "there is no node"


def _need(role: str, asked: WorkerResources) -> Need:
    if asked.gpu > 1 and asked.gpu != int(asked.gpu):
        raise _wrong(role, "gpu", f"{asked.gpu:g}", "whole numbers, or a part of one GPU")
    if asked.gpu_type is not None and not LABEL_VALUE.fullmatch(asked.gpu_type):
        raise _wrong(role, "gpu_type", asked.gpu_type, "any, nvidia, amd or a label: letters, digits, '-', '_' and '.'")
    gpu_type = None if asked.gpu_type == "any" else asked.gpu_type
    return Need(role, asked.cpu, asked.gpu, round(asked.memory_gb * GB), gpu_type)


def _wrong(role: str, key: str, got: str, allowed: str) -> ConfigError:
    return ConfigError("CFG003", f"resources of a {role}: {key} can't be used", got=got, allowed=allowed)


def _ray_types(node: NodeResources) -> set[str]:
    """Names under which the GPU that Ray found on a node may be asked for: its own, and its vendor's."""
    kind = node.labels.get(RAY_LABEL)
    if kind is None:
        return set()
    if kind.startswith("AMD-"):
        return {kind, "amd"}
    return {kind, "nvidia"} if node.total.get("GPU") and not NOT_NVIDIA.match(kind) else {kind}
