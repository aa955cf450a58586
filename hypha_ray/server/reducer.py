"""One outer round of one fragment, as a pure function: θ, momentum and deltas in, new θ and momentum out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from hypha_ray.codec import Codec, Fp32
from hypha_ray.codec.views import tensors
from hypha_ray.config.schema import OuterOptimizer, Sync
from hypha_ray.server.gates import Received, admit, clip_scales, excessive
from hypha_ray.server.merge import Merge, Read, mean, measure, median, scaled, sweep, trimmed_mean
from hypha_ray.server.outer import nesterov, replacement
from hypha_ray.types import Contribution, Flat, Layout, Rejection, Verdict

State = tuple[Flat, Flat]
"""Global weights θ and outer momentum of a fragment; momentum has the parameter groups only."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a reduction goes by."""

    layout: Layout
    fragment: int
    outer: OuterOptimizer
    weighting: Literal["samples", "uniform"] = "samples"
    codec: Codec = field(default_factory=Fp32)
    sync: Sync = field(default_factory=Sync)
    """Merge rule, norm gate and clipping."""

    def merge(self, admitted: Sequence[Received]) -> Merge:
        """How the values of these deltas are made one."""
        match self.sync.merge:
            case "mean":
                return mean([delta.samples if self.weighting == "samples" else 1 for delta in admitted])
            case "trimmed_mean":
                return trimmed_mean(self.sync.trim)
            case "median":
                return median


def initial_momentum(layout: Layout, fragment: int) -> Flat:
    """Momentum before the first round: zeros, for each group of parameters."""
    groups = layout.groups(fragment).items()
    return {group: np.zeros(size, group.rpartition("/")[2]) for group, size in groups if _is_trained(group)}


def blank(layout: Layout, fragment: int) -> State:
    """Arrays that a result fits into, for `reduce` to write to."""
    theta = {group: np.empty(size, group.rpartition("/")[2]) for group, size in layout.groups(fragment).items()}
    return theta, {group: np.empty_like(array) for group, array in theta.items() if _is_trained(group)}


def reduce(
    round: int, theta: Flat, momentum: Flat, received: Iterable[Received], rules: Rules, out: State | None = None
) -> tuple[Flat, Flat, Verdict]:
    """Check deltas, average them, and take the outer step.

    The result doesn't depend on the order in which the deltas are given: they are taken in worker order. Inputs are
    never written to. A delta that is rejected is the same as one that never came; if all are, θ and momentum are
    returned as they are, and the verdict has no `accepted`. Finite θ and momentum stay finite.

    Args:
        round: number of the round, for the verdict.
        theta: global weights, one array for each group of the layout.
        momentum: outer momentum, one array for each group of parameters.
        received: the deltas; each payload in the form that `rules.codec` gives.
        rules: layout, fragment, optimizer, weighting and codec.
        out: arrays for the result, as `blank` makes them, to save the cost of fresh memory.

    """
    admitted, rejected = admit(received, rules.codec.form(rules.layout.groups(rules.fragment)))
    while admitted:
        attempt = _attempt(theta, momentum, admitted, rules, out or blank(rules.layout, rules.fragment))
        reasons = attempt.complaints(rules.sync.norm_gate)
        if not any(reasons):
            accepted = tuple(
                Contribution(delta.worker, delta.incarnation, delta.samples, attempt.norm(index))
                for index, delta in enumerate(admitted)
            )
            return *attempt.state, Verdict(round, accepted, _in_order(rejected), attempt.update_norm())
        pairs = list(zip(admitted, reasons, strict=True))
        rejected += [Rejection(delta.worker, reason) for delta, reason in pairs if reason]
        admitted = [delta for delta, reason in pairs if not reason]
    return theta, momentum, Verdict(round, (), _in_order(rejected), 0.0)


class _Attempt(NamedTuple):
    """A result that is worth something if all its norms are finite; norms are squared, by group."""

    state: State
    deltas: dict[str, list[float]]
    changes: dict[str, float]

    def complaints(self, gate: float) -> list[str | None]:
        """Say of each delta why it can't stay; None if it can. What would hide other complaints comes first."""
        workers = range(len(next(iter(self.deltas.values()))))
        damaged = [self._damage(index) for index in workers]
        if any(damaged):
            return damaged
        strange = excessive([self.norm(index) for index in workers], gate)
        if any(strange):
            return strange
        overflows = [group for group, square in self.changes.items() if not math.isfinite(square)]
        return [f"the outer step overflows in {overflows[0]}" if overflows else None for _ in workers]

    def _damage(self, index: int) -> str | None:
        for group, squares in self.deltas.items():
            if not math.isfinite(squares[index]):
                return f"non-finite values in {group}"
        return None

    def norm(self, index: int) -> float:
        """L2 norm of a worker's delta, buffers left out."""
        return math.sqrt(sum(squares[index] for group, squares in self.deltas.items() if _is_trained(group)))

    def update_norm(self) -> float:
        """L2 norm of the change of θ, buffers left out."""
        return math.sqrt(sum(square for group, square in self.changes.items() if _is_trained(group)))


def _attempt(theta: Flat, momentum: Flat, admitted: Sequence[Received], rules: Rules, out: State) -> _Attempt:
    """Reduce all groups, as if all values were finite."""
    payloads = [tensors(delta.payload) for delta in admitted]
    old, velocity, new, new_velocity = (tensors(flat) for flat in (theta, momentum, *out))
    attempt = _Attempt(out, _unclipped(old, payloads, rules), {})
    scales = _scales(attempt, len(admitted), rules)
    for group, before in old.items():
        read: Read = partial(_read, rules.codec, payloads, group)
        if not before.is_floating_point():
            new[group].copy_(read(slice(None))[0])
            continue
        relative = _is_relative(group, rules)
        if _is_trained(group):
            step = nesterov(rules.outer, before, velocity[group], (new[group], new_velocity[group]), relative)
            read = scaled(read, scales, before, relative)
        else:
            step = replacement(before, new[group])
        norms, attempt.changes[group] = sweep(read, len(admitted), rules.merge(admitted), step, before, relative)
        attempt.deltas.setdefault(group, norms)
    return attempt


def _unclipped(theta: dict[str, torch.Tensor], payloads: list[Any], rules: Rules) -> dict[str, list[float]]:
    """Squared norms of the deltas, by group, where they have to be known before anything is merged."""
    if rules.sync.clip is None:
        return {}
    return {
        group: measure(partial(_read, rules.codec, payloads, group), len(payloads), before, _is_relative(group, rules))
        for group, before in theta.items()
        if _is_trained(group)
    }


def _scales(attempt: _Attempt, workers: int, rules: Rules) -> list[float]:
    """By what each delta is multiplied; if one isn't finite, nothing will come of the attempt anyway."""
    norms = [attempt.norm(index) for index in range(workers)] if attempt.deltas else []
    if rules.sync.clip is None or not all(map(math.isfinite, norms)):
        return [1.0] * workers
    return clip_scales(norms, rules.sync.clip)


def _is_relative(group: str, rules: Rules) -> bool:
    """Whether payloads have deltas there, not weights."""
    return _is_trained(group) and rules.codec.yields == "deltas"


def _read(codec: Codec, payloads: Sequence[dict[str, torch.Tensor]], group: str, part: slice) -> list[torch.Tensor]:
    return [codec.decode(payload, group, part) for payload in payloads]


def _is_trained(group: str) -> bool:
    return group.startswith("parameters/")


def _in_order(rejected: Iterable[Rejection]) -> tuple[Rejection, ...]:
    return tuple(sorted(rejected, key=lambda rejection: rejection.worker))
