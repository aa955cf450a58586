"""One outer round of one fragment, as a pure function: θ, momentum and deltas in, new θ and momentum out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from hypha_ray.codec import Codec, Fp32
from hypha_ray.codec.feedback import BLOCK, blocks, tensors
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.errors import guarded
from hypha_ray.model.flat import empty
from hypha_ray.optim.schedules import outer_rate
from hypha_ray.plugins import is_own
from hypha_ray.server.merge import (
    Merge,
    Squares,
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
from hypha_ray.server.outer import (
    SUM,
    Group,
    RoundPart,
    blended,
    collection,
    delayed,
    fused_step,
    has_fused_kernel,
    outer_step,
    part_of,
    replacement,
    slots_of,
    undelayed,
)
from hypha_ray.server.payloads import Received, admit, clip_scales, excessive, square_sum
from hypha_ray.types import Contribution, Flat, Layout, Rejection, RoundProgress, Verdict
from hypha_ray.types.data import dtype_of, is_trained

if TYPE_CHECKING:
    from hypha_ray.server.optimizer_step import ModelOptimizerStep

_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ReduceSpec:
    """Rules of a reduction."""

    layout: Layout
    fragment: int
    outer: OuterOptimizer
    sync: Sync = field(default_factory=Sync)
    """Merge rule, weighting, norm gate and clipping."""
    codec: Codec = field(default_factory=Fp32)
    optimizer_step: ModelOptimizerStep | None = None
    """Optimizer for payloads that are gradients; None: they are deltas, and `outer` takes the step."""
    rounds: int = 1
    """Number of rounds in the run, for the schedule of the outer learning rate."""
    earlier_steps: int | None = None
    """Number of the fragment's earlier steps; None: one in each round."""
    threads: int = 1
    """Number of memory blocks processed at a time; changes no bit."""
    phase: RoundProgress | None = None
    """Progress of the round before this step; None if a round has only one step."""
    outputs: Literal["all", "theta", "state"] = "all"
    """Results that must be complete; the others may be incomplete if that is faster."""

    @property
    def averages_deltas(self) -> bool:
        """Whether the mean is a sum of equally weighted deltas divided by their number, as in an all-reduce.

        Otherwise it is a running mean of the payloads' values, weights included. That of equal values is exact, and so
        is a step that replaces θ by the mean.
        """
        outer = self.outer
        replaces = outer.name == "average" or (outer.learning_rate, outer.momentum) == (1, 0)
        return (self.sync.weighting, self.sync.merge) == ("uniform", "mean") and not replaces

    @property
    def takes_deltas(self) -> bool:
        """Whether deltas are merged even if payloads are weights, as users' own rules expect."""
        return self.averages_deltas or is_own("merge_rules", self.sync.merge)

    @property
    def known_norms(self) -> tuple[float, ...]:
        """Norms of recently accepted deltas, for rounds of several steps, whose deltas arrive one by one."""
        if self.phase is None:
            return ()
        return self.phase.norms


class State(NamedTuple):
    """Global weights and outer state of a fragment, either before a step or after it."""

    theta: Flat
    momentum: Flat
    """State of the outer optimizer, and the sums of a round with several steps."""


def initial_momentum(layout: Layout, fragment: int, outer: str = "nesterov") -> Flat:
    """Momentum before the first round: zeros for each group of parameters and each state array of the optimizer."""
    sizes = layout.groups(fragment)
    momentum = {}
    for slot in slots_of(outer):
        for group, elements in sizes.items():
            if is_trained(group):
                momentum[slot + group] = np.zeros(elements, dtype_of(group))
    return momentum


def blank(layout: Layout, fragment: int, outer: str = "nesterov", is_stepwise: bool = False) -> State:
    """Uninitialized arrays for a result of `reduce`; `is_stepwise`: whether rounds have several steps."""
    momentum = initial_momentum(layout, fragment, outer)
    state = {name: np.empty_like(array) for name, array in momentum.items()}
    if is_stepwise:
        for group, array in empty(layout, fragment).items():
            if is_trained(group):
                state[SUM + group] = array
    return State(empty(layout, fragment), state)


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
        New θ, new momentum (arrays may be missing if `spec.outputs` is "theta"), and the verdict.

    """
    state = State(theta, momentum)
    least_weight = 0 if spec.sync.traits.sends_gradients else 1  # A gradient of padding alone has weight 0.
    form = spec.codec.form(spec.layout.groups(spec.fragment))
    admitted, rejected = admit(received, form, least_weight)
    while admitted:
        arrays = out or blank(spec.layout, spec.fragment, spec.outer.name, spec.phase is not None)
        result = _reduce_groups(round, state, admitted, spec, arrays)
        reasons = result.reasons_to_reject(len(admitted), spec.sync.norm_gate, spec.known_norms)
        if not any(reasons):
            return *result.state, result.verdict(round, admitted, rejected)
        remaining_deltas = []
        for delta, reason in zip(admitted, reasons, strict=True):
            if reason:
                rejected.append(Rejection(delta.worker, reason))
            else:
                remaining_deltas.append(delta)
        admitted = remaining_deltas
    return theta, momentum, Verdict(round, (), _in_order(rejected), 0.0)


def is_whole(state: Flat, spec: ReduceSpec) -> bool:
    """Whether a result's momentum has all arrays of the outer optimizer."""
    if spec.optimizer_step is not None:
        return True
    groups = spec.layout.groups(spec.fragment)
    for slot in slots_of(spec.outer.name):
        for group in groups:
            if is_trained(group) and slot + group not in state:
                return False
    return True


class _Result(NamedTuple):
    """A result, which is valid if all its norms are finite. `deltas` and `changes` are squared L2 norms by group."""

    state: State
    deltas: dict[str, list[float]]
    changes: dict[str, float]

    def reasons_to_reject(self, workers: int, gate: float, known_norms: Sequence[float] = ()) -> list[str | None]:
        """Reason to reject each delta, or None.

        Norms are compared once no delta is damaged, because damaged ones would shift the median. An overflowing step
        rejects all deltas only if none is excessive.
        """
        damaged = [self._damage(index) for index in range(workers)]
        if any(damaged):
            return damaged
        norms = [self.norm(index) for index in range(workers)]
        too_long = excessive(norms, gate, known_norms)
        if any(too_long):
            return too_long
        for group, square in self.changes.items():
            if not math.isfinite(square):
                return [f"the outer step overflows in {group}"] * workers
        return [None] * workers

    def _damage(self, index: int) -> str | None:
        for group, squares in self.deltas.items():
            if not math.isfinite(squares[index]):
                return f"non-finite values in {group}"
        return None

    def verdict(self, round: int, admitted: Sequence[Received], rejected: Iterable[Rejection]) -> Verdict:
        """Verdict of a round in which all admitted deltas are accepted."""
        contributions = []
        for index, delta in enumerate(admitted):
            contributions.append(Contribution(delta.worker, delta.incarnation, delta.weight, self.norm(index)))
        return Verdict(round, tuple(contributions), _in_order(rejected), self.update_norm())

    def norm(self, index: int) -> float:
        """L2 norm of a worker's delta, buffers left out."""
        parts = [squares[index] for group, squares in self.deltas.items() if is_trained(group)]
        return math.sqrt(sum(parts))

    def update_norm(self) -> float:
        """L2 norm of the change of θ, buffers left out."""
        parts = [square for group, square in self.changes.items() if is_trained(group)]
        return math.sqrt(sum(parts))


def _reduce_groups(round: int, state: State, admitted: Sequence[Received], spec: ReduceSpec, arrays: State) -> _Result:
    """Reduce all groups, assuming that all deltas are valid."""
    reduction = _Reduction.of(round, state, admitted, spec, arrays)
    deltas: dict[str, list[float]] = {}
    changes: dict[str, float] = {}
    for group, theta in reduction.theta.items():
        if not theta.is_floating_point():
            reduction.copy_first(group)
            continue
        if not is_trained(group):
            squares = reduction.merge_buffer(group)
        elif spec.optimizer_step is not None:
            squares = reduction.merge_gradient(group)
        else:
            squares = reduction.step_parameters(group)
        deltas[group] = squares.deltas
        changes[group] = squares.change
    result = _Result(State(arrays.theta, reduction.returned_state(arrays.momentum)), deltas, changes)
    if spec.optimizer_step is not None:
        return _apply_optimizer(round, state, result, spec.optimizer_step)
    return result


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduction of deltas, one group at a time. Each step returns squared L2 norms, as `merge.sweep` does."""

    round: int
    spec: ReduceSpec
    payloads: Sequence[_Tensors]
    weights: Sequence[int]
    """Weight of each delta."""
    merge: Merge
    scales: Sequence[float]
    """Factor of each delta."""
    part: RoundPart | None
    """Share of the deltas in their round; None if a round has only one step."""
    theta: _Tensors
    state: _Tensors
    new_theta: _Tensors
    new_state: _Tensors
    state_not_returned: set[str] = field(default_factory=set)
    """Names of state arrays that weren't computed."""

    @classmethod
    def of(cls, round: int, state: State, admitted: Sequence[Received], spec: ReduceSpec, arrays: State) -> _Reduction:
        """Reduction of admitted deltas; `arrays` become the result."""
        payloads = [tensors(delta.payload) for delta in admitted]
        weights = [delta.weight for delta in admitted]
        theta = tensors(state.theta)
        return cls(
            round=round,
            spec=spec,
            payloads=payloads,
            weights=weights,
            merge=merger(spec.sync, weights),
            scales=_scales(theta, payloads, spec),
            part=part_of(spec.phase, weights),
            theta=theta,
            state=tensors(state.momentum),
            new_theta=tensors(arrays.theta),
            new_state=tensors(arrays.momentum),
        )

    def copy_first(self, group: str) -> None:
        """Copy a buffer of integers from the first delta, because they have no mean."""
        first_values = self.spec.codec.decode(self.payloads[0], group, slice(None))
        self.new_theta[group].copy_(first_values)

    def merge_buffer(self, group: str) -> Squares:
        """Merge a buffer by the same rule as parameters, but without factors and without an optimizer."""
        theta = self.theta[group]
        out = self.new_theta[group]
        values = _values(group, theta, self.payloads, self.spec)
        if self.part is None:
            return self._sweep(values, replacement(theta, out))
        return self._sweep(values, blended(theta, out, self.part.share))

    def merge_gradient(self, group: str) -> Squares:
        """Store the mean gradient in place of new weights, for an optimizer that needs it whole."""
        values = _values(group, self.theta[group], self.payloads, self.spec, self.scales)
        return self._sweep(values, collection(self.new_theta[group]))

    def step_parameters(self, group: str) -> Squares:
        """Merge a group of parameters, and take the outer optimizer's step on it."""
        spec = self.spec
        values = _values(group, self.theta[group], self.payloads, spec, self.scales, spec.takes_deltas)
        parameters = self._group_tensors(group, values)
        fused = self._fused_step(values, parameters)
        if fused is None:
            return self._sweep(values, self._outer_step(group, parameters))
        if spec.outputs == "theta":
            self.state_not_returned.add(group)
        return sweep(values, fused, spec.threads, 4 * BLOCK)

    def returned_state(self, state: Flat) -> Flat:
        """New state without the arrays that weren't computed, and without the sums of a round that is over."""
        drops_sums = self.part is not None and (self.part.closes or not self.spec.sync.delayed_nesterov)
        dropped_names = set(self.state_not_returned)
        for name in state:
            if drops_sums and name.startswith(SUM):
                dropped_names.add(name)
        if not dropped_names:
            return state
        return {name: array for name, array in state.items() if name not in dropped_names}

    def _sweep(self, values: Values, step: Step) -> Squares:
        merge = self.merge
        if values.deltas and self.spec.averages_deltas:
            merge = plain_mean
        return sweep(values, merge_and_step(values, merge, step), self.spec.threads)

    def _group_tensors(self, group: str, values: Values) -> Group:
        """θ and state of a group of parameters, before and after the step."""
        state = []
        new_state = []
        for slot in slots_of(self.spec.outer.name):
            state.append(self.state[slot + group])
            new_state.append(self.new_state[slot + group])
        return Group(self.theta[group], state, self.new_theta[group], new_state, values.relative or values.deltas)

    def _outer_step(self, group: str, parameters: Group) -> Step:
        """Step of the outer optimizer on a group."""
        spec = self.spec
        if self.part is None or spec.phase is None:
            step_number = self.round if spec.earlier_steps is None else spec.earlier_steps
            return outer_step(spec.outer, outer_rate(spec.outer, self.round, spec.rounds), step_number, parameters)
        eta = outer_rate(spec.outer, spec.phase.round, spec.rounds)
        mu = spec.outer.momentum
        if spec.outer.name == "average":
            eta = 1.0
            mu = 0.0
        if not spec.sync.delayed_nesterov:
            return undelayed(eta, mu, parameters, self.part)
        name = SUM + group
        return delayed(eta, mu, parameters, self.part, self.state.get(name), self.new_state[name])

    def _fused_step(self, values: Values, parameters: Group) -> Work[list[float]] | None:
        """Merge and step by one kernel; None if there is none for them."""
        spec = self.spec
        if self.part is not None or not has_fused_kernel(spec.outer, spec.sync):
            return None
        weights = weights_of(spec.sync, self.weights)
        eta = outer_rate(spec.outer, self.round, spec.rounds)
        needs_theta = spec.outputs != "state"
        needs_state = spec.outputs != "theta"
        return fused_step(values, weights, eta, spec.outer.momentum, parameters, needs_theta, needs_state)


def _apply_optimizer(round: int, state: State, result: _Result, optimizer_step: ModelOptimizerStep) -> _Result:
    """Apply the optimizer to the mean gradient, which the result holds in place of the weights."""
    if not all(map(math.isfinite, result.changes.values())):
        return result
    new_theta = result.state.theta
    new_state = optimizer_step.step(round, state.theta, state.momentum, new_theta)
    old_tensors = tensors(state.theta)
    new_tensors = tensors(new_theta)
    changes = dict(result.changes)
    for group in result.changes:
        if is_trained(group):
            changes[group] = _square_distance(old_tensors[group], new_tensors[group])
    for name, array in new_state.items():
        changes[name] = 0.0 if np.isfinite(array).all() else math.inf
    return _Result(State(new_theta, new_state), result.deltas, changes)


def _square_distance(old_values: torch.Tensor, new_values: torch.Tensor) -> float:
    """Squared L2 norm of a difference."""
    parts = blocks(len(old_values))
    return sum(square_sum(new_values[part] - old_values[part]) for part in parts)


def _scales(theta: _Tensors, payloads: Sequence[_Tensors], spec: ReduceSpec) -> list[float]:
    """Factor of each delta. Clipping needs the norms before the merge, and so one more sweep."""
    workers = len(payloads)
    if spec.sync.clip is None:
        return [1.0] * workers
    squares = []
    for group, group_theta in theta.items():
        if is_trained(group):
            squares.append(measure(_values(group, group_theta, payloads, spec), spec.threads))
    norms = []
    for index in range(workers):
        square_norm = sum(group_squares[index] for group_squares in squares)
        norms.append(math.sqrt(square_norm))
    return clip_scales(norms, spec.sync.clip, spec.known_norms)


def _values(
    group: str,
    theta: torch.Tensor,
    payloads: Sequence[_Tensors],
    spec: ReduceSpec,
    scales: Sequence[float] | None = None,
    needs_deltas: bool = False,
) -> Values:
    """Workers' values of a group, with deltas multiplied by `scales`."""
    sends_deltas = spec.codec.yields == "deltas" or spec.optimizer_step is not None
    codec = spec.codec

    def read(part: slice) -> list[torch.Tensor]:
        return [codec.decode(payload, group, part, theta[part]) for payload in payloads]

    decode = guarded(f"codec {spec.sync.codec}", read) if is_own("codecs", spec.sync.codec) else read
    return Values(decode, theta, is_trained(group) and sends_deltas, scales or [1.0] * len(payloads), needs_deltas)


def _in_order(rejected: Iterable[Rejection]) -> tuple[Rejection, ...]:
    return tuple(sorted(rejected, key=lambda rejection: rejection.worker))
