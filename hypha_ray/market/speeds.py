"""Speeds of a training on machines, as earlier runs have measured them, and the worth of offers by strategy ``value``.

A speed is in samples per second of one worker. It belongs to a training, to the amounts of a lease, and to a machine or
a kind of GPU: see `training_key` and `places`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hypha_ray.config import Job
from hypha_ray.market.offers import Offer, share
from hypha_ray.market.requirements import GB, OWN_LABEL, RAY_LABEL, NodeResources

_SAVING = ("gradient_checkpointing", "fused_loss", "probe_batch_size")
_WORKER = ("device", "processes", "autocast", "compile", "attention", *_SAVING)
"""Keys of ``[worker]`` that a speed depends on."""


def training_key(job: Job, shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash of all that a worker's speed depends on, besides its machine; `shapes` are those of a sample's tensors."""
    told = [
        job.model.model_dump(mode="json", exclude={"token"}),
        job.worker.model_dump(mode="json", include=set(_WORKER)),
        [job.rounds.max_batch_size, job.rounds.accumulation, job.inner_optimizer.name],
        job.rl.model_dump(mode="json") if job.rl.algorithm is not None else None,
        [job.testing.batch_s, job.testing.batch_times_s, job.testing.slowdown],
        {name: list(shape) for name, shape in shapes.items()},
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def places(node: NodeResources, amounts: Mapping[str, float]) -> list[str]:
    """Names under which the speed of a lease is kept: by its machine, and by its kind of GPU if it has GPUs."""
    gpus = amounts.get("GPU", 0.0)
    kind = node.labels.get(OWN_LABEL) or node.labels.get(RAY_LABEL)
    where = [node.id, kind] if gpus and kind else [node.id]
    return [f"{place}/{amounts.get('CPU', 0.0):g} CPU, {gpus:g} GPU" for place in where]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one training: samples per second by place."""

    known: Mapping[str, float] = field(default_factory=dict)

    def of(self, node: NodeResources, amounts: Mapping[str, float]) -> float | None:
        """Speed of a lease of these amounts; None if it was measured neither there nor on such a GPU."""
        return next((self.known[place] for place in places(node, amounts) if place in self.known), None)


UNKNOWN = Speeds()
"""Speeds of a training that has been on no machine yet."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Worth of a lease: an amount, and the unit and source of it."""

    amount: float
    basis: str

    def __str__(self) -> str:
        return f"{self.amount:.3g} {self.basis}"


def worths(offers: Sequence[Offer]) -> dict[str, Worth]:
    """Worth of a lease of each offer, by the node's id.

    A measured speed comes first. If only some are, the others are estimated: by the throughput that owners state if
    all do, otherwise by resources, at the median ratio of the measured ones.
    """
    stated = all(offer.terms.throughput for offer in offers)
    guesses = {
        offer.node.id: share(offer.amounts, offer.node) * (offer.terms.throughput or 0.0)
        if stated
        else _units(offer.amounts)
        for offer in offers
    }
    measured = {offer.node.id: offer.speed for offer in offers if offer.speed is not None}
    if not measured:
        basis = "of the stated throughput" if stated else "units of resources"
        return {node: Worth(guess, basis) for node, guess in guesses.items()}
    ratio = median(speed / guesses[node] for node, speed in measured.items())
    basis = f"samples/s, estimated from {'the stated throughput' if stated else 'resources'}"
    return {
        node: Worth(measured[node], "samples/s, measured") if node in measured else Worth(ratio * guess, basis)
        for node, guess in guesses.items()
    }


def _units(amounts: Mapping[str, float]) -> float:
    """Worth of resources whose speed isn't known: a GPU counts as 25 CPUs, and a GB of memory as a tenth of one."""
    return 25 * amounts.get("GPU", 0.0) + amounts.get("CPU", 0.0) + 0.1 * amounts.get("memory", 0.0) / GB
