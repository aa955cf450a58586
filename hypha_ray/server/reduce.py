"""One outer round of one fragment, as a pure function: θ, momentum and deltas in, new θ and momentum out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from hypha_ray.codec import Codec, Fp32
from hypha_ray.codec.blocks import BLOCK, blocks, tensors
from hypha_ray.config.schema import Sync
from hypha_ray.config.tables.training import OuterOptimizer
from hypha_ray.model.flat import empty
from hypha_ray.optim.schedules import outer_rate
from hypha_ray.plugins import is_own
from hypha_ray.server.admission import Received, admit, clip_scales, excessive, square_sum
from hypha_ray.server.delayed_nesterov import SUM, Part, blended, delayed, part_of, undelayed
from hypha_ray.server.merge import (
    Step,
    Values,
    Work,
    measure,
    merge_and_step,
    merger,
    plain_mean,
    sweep,
    weights_of,
)
from hypha_ray.server.outer import Group, collection, in_one_pass, is_common, outer_step, replacement, slots_of
from hypha_ray.types import Contribution, Flat, Layout, Rejection, RoundProgress, Verdict
from hypha_ray.types.layout import dtype_of, is_trained


class OptimizerStep(Protocol):
    """An optimizer of synchronous steps."""

    def step(self, round: int, theta: Flat, state: Flat, out: Flat) -> Flat:
        """Write new weights over the mean gradient in `out`, and return the new state."""
        ...


@dataclass(frozen=True, slots=True)
class ReduceSpec:
    """Rules of a reduction."""

    layout: Layout
    fragment: int
    outer: OuterOptimizer
    sync: Sync = field(default_factory=Sync)
    """Merge rule, weighting, norm gate and clipping."""
    codec: Codec = field(default_factory=Fp32)
    optimizer_step: OptimizerStep | None = None
    """Optimizer for payloads that are gradients; None: they are deltas, and `outer` takes the step."""
    rounds: int = 1
    """Number of rounds in the run, for the schedule of the outer learning rate."""
    turn: int | None = None
    """Number of the fragment's earlier steps; None: one in each round."""
    threads: int = 1
    """Number of memory blocks processed at a time; changes no bit."""
    phase: RoundProgress | None = None
    """Progress of the round before this step; None if a round has only one step."""
    wanted: Literal["all", "theta", "state"] = "all"
    """Results that must be complete; the others may be incomplete if that is faster."""

    @property
    def averages_deltas(self) -> bool:
        """Whether the mean is a sum of equally weighted deltas divided by their number, as in an all-reduce.

        Otherwise it is a running mean of the payloads' values, weights included. That of equal values is exact, and so
        is a step that replaces θ by the mean.
        """
        replaces = self.outer.name == "average" or (self.outer.learning_rate, self.outer.momentum) == (1, 0)
        return (self.sync.weighting, self.sync.merge) == ("uniform", "mean") and not replaces

    @property
    def takes_deltas(self) -> bool:
        """Whether deltas are merged even if payloads are weights, as users' own rules expect."""
        return self.averages_deltas or is_own("merge_rules", self.sync.merge)

    @property
    def known_norms(self) -> tuple[float, ...]:
        """Norms of recently accepted deltas, for rounds of several steps, whose deltas arrive one by one."""
        return () if self.phase is None else self.phase.norms


State = tuple[Flat, Flat]
"""Global weights θ and outer momentum of a fragment, which is the outer optimizer's state of parameters."""

_Tensors = dict[str, torch.Tensor]


def initial_momentum(layout: Layout, fragment: int, outer: str = "nesterov") -> Flat:
    """Momentum before the first round: zeros for each group of parameters and each state array of the optimizer."""
    groups = layout.groups(fragment).items()
    return {
        slot + group: np.zeros(size, dtype_of(group))
        for slot in slots_of(outer)
        for group, size in groups
        if is_trained(group)
    }


def blank(layout: Layout, fragment: int, outer: str = "nesterov", stepwise: bool = False) -> State:
    """Uninitialized arrays for a result of `reduce`; `stepwise`: whether rounds have several steps."""
    momentum = initial_momentum(layout, fragment, outer)
    sums = {SUM + name: array for name, array in empty(layout, fragment).items() if stepwise and is_trained(name)}
    return empty(layout, fragment), {name: np.empty_like(array) for name, array in momentum.items()} | sums


def reduce(
    round: int, theta: Flat, momentum: Flat, received: Iterable[Received], spec: ReduceSpec, out: State | None = None
) -> tuple[Flat, Flat, Verdict]:
    """Check deltas, merge them, and take the outer step.

    Deltas are taken in worker order, so the result doesn't depend on their given order. Inputs are never written to.
    A rejected delta has the effect of an absent one. If all are rejected, θ and momentum are returned unchanged, and
    the verdict has no `accepted`. Finite θ and momentum stay finite.

    Args:
        round: number of the round, for the verdict.
        theta: global weights, one array for each group of the layout.
        momentum: outer momentum, in the form of `initial_momentum`.
        received: the deltas; payloads in the form of `spec.codec`.
        spec: layout, fragment, optimizer, merge rule, gates and codec.
        out: arrays for the result, from `blank`, to save the allocation of memory.

    Returns:
        New θ, new momentum (arrays may be missing if `spec.wanted` is "theta"), and the verdict.

    """
    least = 0 if spec.sync.traits.sends_gradients else 1  # A gradient of padding alone has no part in the mean.
    admitted, rejected = admit(received, spec.codec.form(spec.layout.groups(spec.fragment)), least)
    while admitted:
        room = out or blank(spec.layout, spec.fragment, spec.outer.name, spec.phase is not None)
        result = _reduced(round, theta, momentum, admitted, spec, room)
        reasons = result.complaints(len(admitted), spec.sync.norm_gate, spec.known_norms)
        if not any(reasons):
            accepted = tuple(
                Contribution(delta.worker, delta.incarnation, delta.weight, result.norm(index))
                for index, delta in enumerate(admitted)
            )
            return *result.state, Verdict(round, accepted, _in_order(rejected), result.update_norm())
        pairs = list(zip(admitted, reasons, strict=True))
        rejected += [Rejection(delta.worker, reason) for delta, reason in pairs if reason]
        admitted = [delta for delta, reason in pairs if not reason]
    return theta, momentum, Verdict(round, (), _in_order(rejected), 0.0)


def is_whole(state: Flat, spec: ReduceSpec) -> bool:
    """Whether a result's momentum has all arrays of the outer optimizer."""
    slots = () if spec.optimizer_step is not None else slots_of(spec.outer)
    groups = [group for group in spec.layout.groups(spec.fragment) if is_trained(group)]
    return all(slot + group in state for slot in slots for group in groups)


class _Result(NamedTuple):
    """A result, which is valid if all its norms are finite. `deltas` and `changes` are squared L2 norms by group."""

    state: State
    deltas: dict[str, list[float]]
    changes: dict[str, float]

    def complaints(self, workers: int, gate: float, known: Sequence[float] = ()) -> list[str | None]:
        """Reason to reject each delta, or None.

        Norms are compared once no delta is damaged, because damaged ones would shift the median. An overflowing step
        rejects all deltas only if none is excessive.
        """
        damaged = [self._damage(index) for index in range(workers)]
        if any(damaged):
            return damaged
        strange = excessive([self.norm(index) for index in range(workers)], gate, known)
        if any(strange):
            return strange
        overflows = [group for group, square in self.changes.items() if not math.isfinite(square)]
        return [f"the outer step overflows in {overflows[0]}" if overflows else None] * workers

    def _damage(self, index: int) -> str | None:
        for group, squares in self.deltas.items():
            if not math.isfinite(squares[index]):
                return f"non-finite values in {group}"
        return None

    def norm(self, index: int) -> float:
        """L2 norm of a worker's delta, buffers left out."""
        return math.sqrt(sum(squares[index] for group, squares in self.deltas.items() if is_trained(group)))

    def update_norm(self) -> float:
        """L2 norm of the change of θ, buffers left out."""
        return math.sqrt(sum(square for group, square in self.changes.items() if is_trained(group)))


def _reduced(
    round: int, theta: Flat, momentum: Flat, admitted: Sequence[Received], spec: ReduceSpec, out: State
) -> _Result:
    """Reduce all groups, assuming that all deltas are valid. Buffers are merged by the same rule, but never scaled."""
    payloads = [tensors(delta.payload) for delta in admitted]
    weights = [delta.weight for delta in admitted]
    merge = merger(spec.sync, weights)
    part = None if spec.phase is None else part_of(spec.phase, weights)
    old, velocity, new, new_velocity = (tensors(flat) for flat in (theta, momentum, *out))
    scales = _scales(old, payloads, spec)
    left_out: set[str] = set()
    result = _Result((out[0], _kept(out[1], part, spec.sync)), {}, {})
    for group, before in old.items():
        if not before.is_floating_point():
            new[group].copy_(spec.codec.decode(payloads[0], group, slice(None)))
            continue
        quick = None
        if not is_trained(group):
            values = _values(group, before, payloads, spec)
            step = replacement(before, new[group]) if part is None else blended(before, new[group], part.share)
        elif spec.optimizer_step is not None:
            values = _values(group, before, payloads, spec, scales)
            step = collection(new[group])
        else:
            values = _values(group, before, payloads, spec, scales, spec.takes_deltas)
            where = _where(spec, values, group, (old, velocity, new, new_velocity))
            sums = velocity.get(SUM + group), new_velocity.get(SUM + group)
            step = _step(round, spec, part, where, sums)
            quick = _at_once(round, spec, values, where, weights) if part is None else None
        if quick is not None and spec.wanted == "theta":
            left_out.add(group)
        work = quick or merge_and_step(values, plain_mean if values.deltas and spec.averages_deltas else merge, step)
        squares = sweep(values, work, spec.threads, BLOCK if quick is None else 4 * BLOCK)
        result.deltas[group], result.changes[group] = squares
    if left_out:
        kept = {name: array for name, array in result.state[1].items() if name not in left_out}
        result = result._replace(state=(out[0], kept))
    return result if spec.optimizer_step is None else _descended(round, theta, momentum, result, spec.optimizer_step)


def _where(spec: ReduceSpec, values: Values, group: str, flats: tuple[_Tensors, ...]) -> Group:
    """A group of parameters, taken from `flats`: old θ and state, new θ and state."""
    old, velocity, new, new_velocity = flats
    slots = [slot + group for slot in slots_of(spec.outer)]
    states = ([arrays[slot] for slot in slots] for arrays in (velocity, new_velocity))
    return Group(old[group], next(states), new[group], next(states), values.relative or values.deltas)


def _step(
    round: int,
    spec: ReduceSpec,
    part: Part | None,
    where: Group,
    sums: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Step:
    """The outer optimizer's step on a group; `sums`: old and new sum of a round with several steps."""
    if part is None or spec.phase is None:
        turn = round if spec.turn is None else spec.turn
        return outer_step(spec.outer, outer_rate(spec.outer, round, spec.rounds), turn, where)
    eta = outer_rate(spec.outer, spec.phase.round, spec.rounds)
    mu = spec.outer.momentum
    if spec.outer.name == "average":
        eta = 1.0
        mu = 0.0
    if not spec.sync.delayed_nesterov:
        return undelayed(eta, mu, where, part)
    assert sums[1] is not None
    return delayed(eta, mu, where, part, (sums[0], sums[1]))


def _at_once(
    round: int, spec: ReduceSpec, values: Values, where: Group, given: Sequence[int]
) -> Work[list[float]] | None:
    """Fused work on a group; None if there is no fused kernel for it."""
    if not is_common(spec.outer, spec.sync):
        return None
    weights = weights_of(spec.sync, given)
    eta = outer_rate(spec.outer, round, spec.rounds)
    wanted = spec.wanted != "state", spec.wanted != "theta"
    return in_one_pass(values, weights, eta, spec.outer.momentum, where, *wanted)


def _kept(state: Flat, part: Part | None, sync: Sync) -> Flat:
    """State to keep after the step: without the sums of a round that is over."""
    if part is None or (sync.delayed_nesterov and not part.closes):
        return state
    return {name: array for name, array in state.items() if not name.startswith(SUM)}


def _descended(round: int, theta: Flat, state: Flat, result: _Result, optimizer_step: OptimizerStep) -> _Result:
    """Apply the optimizer to the mean gradient, which the result holds in place of the weights."""
    if not all(map(math.isfinite, result.changes.values())):
        return result
    new = result.state[0]
    state = optimizer_step.step(round, theta, state, new)
    before = tensors(theta)
    after = tensors(new)
    changes = {group: _distance(before[group], after[group]) for group in result.changes if is_trained(group)}
    changes |= {name: 0.0 if np.isfinite(array).all() else math.inf for name, array in state.items()}
    return result._replace(state=(new, state), changes=result.changes | changes)


def _distance(before: torch.Tensor, after: torch.Tensor) -> float:
    """Squared L2 norm of a difference."""
    return sum(square_sum(after[part] - before[part]) for part in blocks(len(before)))


def _scales(theta: _Tensors, payloads: Sequence[_Tensors], spec: ReduceSpec) -> list[float]:
    """Factor of each delta. Clipping needs the norms before the merge, and so one more sweep."""
    workers = range(len(payloads))
    if spec.sync.clip is None:
        return [1.0 for _ in workers]
    trained = [(group, before) for group, before in theta.items() if is_trained(group)]
    squares = [measure(_values(group, before, payloads, spec), spec.threads) for group, before in trained]
    norms = [math.sqrt(sum(one[index] for one in squares)) for index in workers]
    return clip_scales(norms, spec.sync.clip, spec.known_norms)


def _values(
    group: str,
    theta: torch.Tensor,
    payloads: Sequence[_Tensors],
    spec: ReduceSpec,
    scales: Sequence[float] | None = None,
    deltas: bool = False,
) -> Values:
    """Workers' values of a group, with deltas multiplied by `scales`."""
    relative = is_trained(group) and (spec.codec.yields == "deltas" or spec.optimizer_step is not None)
    read = partial(_read, spec.codec, payloads, group)
    return Values(read, theta, relative, scales or [1.0] * len(payloads), deltas)


def _read(codec: Codec, payloads: Sequence[_Tensors], group: str, part: slice) -> list[torch.Tensor]:
    return [codec.decode(payload, group, part) for payload in payloads]


def _in_order(rejected: Iterable[Rejection]) -> tuple[Rejection, ...]:
    return tuple(sorted(rejected, key=lambda rejection: rejection.worker))
