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

from hypha_ray.config import Job
from hypha_ray.config.resources import WorkerGroup, WorkerResources
from hypha_ray.errors import CapacityError, ConfigError

GB = 1_000_000_000
OWN_LABEL = "gpu_type"
RAY_LABEL = "ray.io/accelerator-type"
"""The labels that name a node's GPU: the one its owner gives, and the one that Ray finds out by itself."""
ID_LABEL = "ray.io/node-id"
"""The label in which Ray gives each node its id."""
AMD = "AMD-"
"""Beginning of Ray's names of GPUs by AMD."""
NOT_NVIDIA = re.compile(rf"{AMD}|Intel-|MXC|Apple-|M\d")
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


@dataclass(frozen=True, slots=True)
class _Remainder:
    """Amounts that are left on a node."""

    node: NodeResources
    amounts: Mapping[str, float]


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
        parts = []
        for amount, unit in amounts:
            if amount > 0:
                parts.append(f"{amount:g} {unit}")
        if not parts:
            parts.append("no reservation")
        if self.gpu_type is not None:
            parts.append(f"gpu_type {self.gpu_type}")
        return ", ".join(parts)

    def selector(self, nodes: Sequence[NodeResources]) -> dict[str, str]:
        """The bundle's label selector: by the owners' label, or by Ray's where only that names the type."""
        if self.gpu_type is None:
            return {}
        key, values = self._label(self.gpu_type, nodes)
        names = ",".join(sorted(values))
        return {key: f"in({names})"}

    def admits(self, nodes: Sequence[NodeResources]) -> list[bool]:
        """Flags of the nodes, in their order: True if the selector takes the node."""
        if self.gpu_type is None:
            return [True] * len(nodes)
        key, values = self._label(self.gpu_type, nodes)
        return [node.labels.get(key) in values for node in nodes]

    @staticmethod
    def _label(gpu_type: str, nodes: Sequence[NodeResources]) -> tuple[str, set[str]]:
        """Label that names the type of GPU, and its values that match."""
        ray_values = set()
        for node in nodes:
            if node.labels.get(OWN_LABEL) == gpu_type:
                return OWN_LABEL, {gpu_type}
            if gpu_type in _ray_types(node):
                ray_values.add(node.labels[RAY_LABEL])
        if ray_values:
            return RAY_LABEL, ray_values
        return OWN_LABEL, {gpu_type}


@dataclass(frozen=True, slots=True)
class Shortage:
    """Reason that not all actors fit: for `short` of the `count` ones with this need there is no node."""

    need: Need
    count: int
    short: int
    busy: bool
    """The nodes would have room if they were idle."""
    reason: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.short} of {self.count} short"

    def error(self) -> CapacityError:
        """The same for the user."""
        if self.busy:
            return CapacityError("CFG004", f"the cluster is busy: {self}", fix="wait for other jobs, or add nodes")
        fix = "ask for less in [resources], or add nodes"
        return CapacityError("CFG004", f"the cluster is too small: {self}", fix=fix)


def group_need(group: WorkerGroup) -> Need:
    """Needs of a worker of the group; empty if its trainer dials in from elsewhere."""
    return Need("worker") if group.dials_in else _need("worker", group)


def worker_needs(job: Job) -> list[Need]:
    """Needs of each worker, in the order of their numbers."""
    needs_by_number: list[Need] = []
    for group in job.worker_groups:
        needs_by_number += [group_need(group)] * group.count
    return needs_by_number


def server_need(job: Job) -> Need:
    """Needs of one parameter server."""
    return _need("server", job.resources.parameter_server)


def generator_need(job: Job) -> Need:
    """Needs of one generator, which only responds to prompts."""
    return _need("generator", job.resources.generator)


def generators_with_room(job: Job, nodes: Sequence[NodeResources]) -> int:
    """Number of generators that find room now, beside all workers that do; 0 without room for `min_workers`."""
    try:
        workers = len(workers_to_start(job, nodes))
    except CapacityError:
        return 0
    need = generator_need(job)
    return _largest_count({need: 0, **needs(job, workers)}, need, job.rl.generators, nodes)


def needs(job: Job, workers: int) -> dict[Need, int]:
    """Needs of that many workers and all parameter servers, each with its count."""
    counts = Counter(worker_needs(job)[:workers])
    return {**counts, server_need(job): job.sync.fragments}


def workers_to_start(job: Job, nodes: Sequence[NodeResources]) -> list[int]:
    """Numbers of the workers that find room now beside the parameter servers; earlier groups come first.

    Raises:
        CapacityError: fewer than `min_workers` fit.

    """
    counts = {server_need(job): job.sync.fragments}
    numbers = list[int]()
    first_worker = 0
    for group in job.worker_groups:
        need = group_need(group)
        fitting_count = _largest_count({need: 0, **counts}, need, group.count, nodes)
        counts[need] = counts.get(need, 0) + fitting_count
        numbers += range(first_worker, first_worker + fitting_count)
        first_worker += group.count
    least_workers = min(job.resources.min_workers, job.num_workers)
    if len(numbers) < least_workers:
        missing = shortage(needs(job, least_workers), nodes)
        if missing is not None:
            raise missing.error()
    return numbers


def _largest_count(counts: Mapping[Need, int], need: Need, count: int, nodes: Sequence[NodeResources]) -> int:
    """The most workers of one need, `count` at most, that fit beside what is chosen."""

    def fits(more_leases: int) -> bool:
        return shortage({**counts, need: counts[need] + more_leases}, nodes) is None

    larger_needs = {}
    for chosen_need, chosen_count in counts.items():
        if _size(chosen_need) > _size(need):
            larger_needs[chosen_need] = chosen_count
    while count > 0 and (missing := shortage({**larger_needs, need: counts[need] + count}, nodes)) is not None:
        count = count - missing.short if missing.need == need else 0
    # Smaller needs take few of the places that are left, so the search goes down from there in growing steps.
    least_count = count
    step = 1
    while least_count > 0 and not fits(least_count):
        count = least_count - 1
        least_count = least_count - step
        step = 2 * step
    least_count = max(0, least_count)
    return least_count + bisect_left(range(least_count + 1, count + 1), True, key=lambda more: not fits(more))


def shortage(counts: Mapping[Need, int], nodes: Sequence[NodeResources]) -> Shortage | None:
    """First shortage of the nodes as they are now; None if all needs fit.

    First fit, the largest need first: exact for equal needs, and for one kind beside others that reserve nothing.
    """
    of_idle_nodes = _pack(counts, nodes, [node.total for node in nodes], is_busy=False)
    return of_idle_nodes or _pack(counts, nodes, [node.free for node in nodes], is_busy=True)


def nearest(need: Need, nodes: Sequence[NodeResources]) -> NodeResources | None:
    """Node that comes closest to having room; None if the need admits none of them."""
    admitted = []
    for node, is_admitted in zip(nodes, need.admits(nodes), strict=True):
        if is_admitted:
            admitted.append(_Remainder(node, node.free))
    return _closest(need, admitted).node if admitted else None


def _pack(
    counts: Mapping[Need, int], nodes: Sequence[NodeResources], free: Sequence[Mapping[str, float]], is_busy: bool
) -> Shortage | None:
    """Pack needs onto nodes with these free amounts; returns the first shortage, None if all needs fit."""
    remaining_amounts = [dict(amounts) for amounts in free]
    for need in sorted(counts, key=_size, reverse=True):
        admitted = [index for index, is_admitted in enumerate(need.admits(nodes)) if is_admitted]
        short = counts[need]
        bundle = need.bundle()
        for index in admitted:
            if not short:
                break
            amounts = remaining_amounts[index]
            count = min(short, _times_in(bundle, amounts))
            for name, amount in bundle.items():
                amounts[name] = amounts.get(name, 0.0) - count * amount
            short -= count
        if short > 0:
            remainders = [_Remainder(nodes[index], remaining_amounts[index]) for index in admitted]
            reason = _lack(need, remainders) if remainders else _no_node(need, nodes)
            return Shortage(need, counts[need], short, is_busy, reason)
    return None


def _size(need: Need) -> tuple[float, ...]:
    """Order in which needs are packed, the largest first."""
    return need.gpu, need.memory_bytes, need.cpu


def times_in(need: Need, amounts: Mapping[str, float]) -> int:
    """Number of times that a need fits, counted in ten-thousandths as Ray does."""
    return _times_in(need.bundle(), amounts)


def _times_in(bundle: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    times = sys.maxsize
    for name, amount in bundle.items():
        units = _units(amounts.get(name, 0.0))
        times = min(times, units // max(1, _units(amount)))
    return times


def _units(amount: float) -> int:
    return max(0, round(amount * 1e4))


def _lack(need: Need, remainders: Sequence[_Remainder]) -> str:
    """Lack of the node that comes closest."""
    closest = _closest(need, remainders)
    _, resource = _gaps(need, closest.amounts)[0]
    unit = "GB of memory" if resource == "memory" else resource
    needed = _amount_text(need.bundle(), resource)
    free = _amount_text(closest.amounts, resource)
    total = _amount_text(closest.node.total, resource)
    node_text = f"the closest node, {closest.node.address}, has {free} of its {total} left"
    return f"{needed} {unit} per {need.role} is needed; {node_text}"


def _amount_text(amounts: Mapping[str, float], resource: str) -> str:
    """Amount of a resource as text: memory in GB, others in Ray's unit."""
    unit_size = GB if resource == "memory" else 1
    amount = round(amounts.get(resource, 0.0) / unit_size, 4)
    return f"{max(0.0, amount):g}"


def _closest(need: Need, remainders: Sequence[_Remainder]) -> _Remainder:
    """Node that comes closest: fewest resources short, then the smallest gap, then the most in all."""

    def distance(remainder: _Remainder) -> tuple[float, ...]:
        gaps = _gaps(need, remainder.amounts)
        if not gaps:
            return (0,)
        gap, resource = gaps[0]
        return (len(gaps), gap, -remainder.node.total.get(resource, 0.0))

    return min(remainders, key=distance)


def _gaps(need: Need, amounts: Mapping[str, float]) -> list[tuple[float, str]]:
    """Missing parts of the needed amounts, each with its resource, the largest first."""
    gaps = []
    for name, amount in need.bundle().items():
        gap = 1 - amounts.get(name, 0.0) / amount
        if gap > 0:
            gaps.append((gap, name))
    return sorted(gaps, reverse=True)


def _no_node(need: Need, nodes: Sequence[NodeResources]) -> str:
    if not nodes:
        return "there is no node"
    types = set[str]()
    for node in nodes:
        for key in (OWN_LABEL, RAY_LABEL):
            if key in node.labels:
                types.add(node.labels[key])
    labels = f"no node has a label {OWN_LABEL} or {RAY_LABEL}"
    if types:
        labels = f"the labels there: {', '.join(sorted(types))}"
    return f"no node has gpu_type {need.gpu_type} for a {need.role}; {labels}"


def _need(role: str, resources: WorkerResources) -> Need:
    if resources.gpu > 1 and resources.gpu != int(resources.gpu):
        raise _wrong(role, "gpu", f"{resources.gpu:g}", "whole numbers, or a part of one GPU")
    gpu_type = resources.gpu_type
    if gpu_type is not None and not LABEL_VALUE.fullmatch(gpu_type):
        raise _wrong(role, "gpu_type", gpu_type, "any, nvidia, amd or a label: letters, digits, '-', '_' and '.'")
    if gpu_type == "any":
        gpu_type = None
    return Need(role, resources.cpu, resources.gpu, round(resources.memory_gb * GB), gpu_type)


def _wrong(role: str, key: str, got: str, allowed: str) -> ConfigError:
    return ConfigError("CFG003", f"resources of a {role}: {key} can't be used", got=got, allowed=allowed)


def _ray_types(node: NodeResources) -> set[str]:
    """Names under which the GPU that Ray found on a node may be asked for: its own, and its vendor's."""
    gpu_type = node.labels.get(RAY_LABEL)
    if gpu_type is None:
        return set()
    if gpu_type.startswith(AMD):
        return {gpu_type, "amd"}
    if node.total.get("GPU") and not NOT_NVIDIA.match(gpu_type):
        return {gpu_type, "nvidia"}
    return {gpu_type}
