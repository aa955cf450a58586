"""Outer optimizers, which update global weights by the workers' mean: built-in, a user's, and fused with the merge.

Without a barrier deltas update θ as they arrive, and outer momentum once per round. This is delayed Nesterov (Liu et
al., Async Local-SGD, arXiv 2401.09135, algorithm 3, with c = 0). The steps of a round add up to one step of Nesterov
momentum on the weighted mean of its deltas, however they are grouped. The round's last step corrects for weights that
differed from the expected ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch

from hypha_ray.config import Job
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.errors import guarded
from hypha_ray.kernels import Averaged, is_worth_it, load_ahead, portions
from hypha_ray.kernels import nesterov as fused_nesterov
from hypha_ray.plugins import create, find
from hypha_ray.server.merge import Step, Values, Work, require_like, shares
from hypha_ray.server.payloads import square_distance, square_sum
from hypha_ray.types import Flat, RoundProgress

SLOTS: dict[str, tuple[str, ...]] = {"nesterov": ("",), "average": (), "adam": ("first/", "second/")}
"""State arrays of a group of parameters, by built-in optimizer: prefixes of the group's name."""
SUM = "sum/"
"""Prefix of a group's name in the outer state: the change of θ so far in this round, divided by η."""


class Group(NamedTuple):
    """A group of parameters: θ and state, which are never written to, and the arrays for new ones."""

    theta: torch.Tensor
    state: Sequence[torch.Tensor]
    new_theta: torch.Tensor
    new_state: Sequence[torch.Tensor]
    relative: bool
    """Whether the mean is one of deltas instead of weights."""

    def delta(self, mean: torch.Tensor, part: slice, scratch: torch.Tensor) -> torch.Tensor:
        """Mean delta of a block: the mean itself, or its difference to θ, stored in `scratch`."""
        if self.relative:
            return mean
        return torch.sub(mean, self.theta[part], out=scratch)

    def next_velocity(self, delta: torch.Tensor, mu: float, part: slice) -> torch.Tensor:
        """Momentum v ← μv + Δ of a block, stored in the new state; Δ itself if there is no state."""
        if not self.state:
            return delta
        velocity = torch.mul(self.state[0][part], mu, out=self.new_state[0][part])
        return velocity.add_(delta)


class Outer(Protocol):
    """Outer optimizer that treats each element by itself, and whose only state is that of its slots."""

    slots: ClassVar[tuple[str, ...]]
    """Names of its state arrays, which have the parameters' shape and begin as zeros."""

    def step(
        self, theta: torch.Tensor, delta: torch.Tensor, state: list[torch.Tensor], rate: float, round: int
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return new θ and new state.

        Args:
            theta: a block of the global weights, 1-D.
            delta: the workers' mean delta.
            state: one array for each slot.
            rate: η of the round.
            round: number of earlier steps.

        """


def slots_of(outer: str) -> tuple[str, ...]:
    """State arrays of a group of parameters, by name of the optimizer: prefixes of the group's name."""
    if outer in SLOTS:
        return SLOTS[outer]
    return tuple(f"{slot}/" for slot in find("outer_optimizers", outer).slots)


def outer_step(outer: OuterOptimizer, eta: float, round: int, group: Group) -> Step:
    """Step of the job's outer optimizer, with the round's learning rate η."""
    member = find("outer_optimizers", outer.name)
    if inspect.isclass(member):
        return guarded(f"outer optimizer {outer.name}", own_step(outer, eta, round, group))
    step: Step = member(outer, eta, round, group)
    return step


def nesterov(outer: OuterOptimizer, eta: float, round: int, group: Group) -> Step:
    """Step of Nesterov momentum."""
    return _nesterov(eta, outer.momentum, group)


def average(outer: OuterOptimizer, eta: float, round: int, group: Group) -> Step:
    """Step to the workers' mean."""
    return _nesterov(1.0, 0.0, group)


def _nesterov(eta: float, mu: float, group: Group) -> Step:
    """Nesterov momentum on the mean delta, as DiLoCo does (arXiv 2311.08105, algorithm 1).

    v ← μv + Δ̄; θ ← θ + η(μv + Δ̄), the same operations as `torch.optim.SGD(nesterov=True)` with gradient −Δ̄. With η = 1
    and μ = 0 the new θ equals the workers' mean, bit for bit. Without a state, μ is 0.
    """

    def step(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        theta = group.theta[part]
        new_theta = group.new_theta[part]
        delta = group.delta(mean, part, scratch)
        velocity = group.next_velocity(delta, mu, part)
        if eta == 1 and mu == 0 and not group.relative:
            new_theta.copy_(mean)
        else:
            look_ahead = torch.add(delta, velocity, alpha=mu, out=scratch)
            torch.add(theta, look_ahead, alpha=eta, out=new_theta)
        return square_distance(new_theta, theta, scratch)

    return step


def adam(outer: OuterOptimizer, eta: float, round: int, group: Group) -> Step:
    """FedAdam (arXiv 2003.00295) with bias correction: `torch.optim.Adam` with the gradient −Δ̄."""
    beta1, beta2 = outer.betas
    correction1 = 1 - beta1 ** (round + 1)
    correction2 = 1 - beta2 ** (round + 1)

    def step(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        theta = group.theta[part]
        new_theta = group.new_theta[part]
        delta = group.delta(mean, part, scratch)
        first_moment = group.new_state[0][part]
        second_moment = group.new_state[1][part]
        torch.lerp(group.state[0][part], delta, 1 - beta1, out=first_moment)
        torch.mul(group.state[1][part], beta2, out=second_moment)
        second_moment.addcmul_(delta, delta, value=1 - beta2)
        root = torch.sqrt(second_moment, out=scratch)
        root.div_(math.sqrt(correction2)).add_(outer.epsilon)
        torch.addcdiv(theta, first_moment, root, value=eta / correction1, out=new_theta)
        return square_distance(new_theta, theta, scratch)

    return step


def collection(out: torch.Tensor) -> Step:
    """Step that stores the mean, for an optimizer that needs it whole."""

    def step(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        return square_sum(out[part].copy_(mean))

    return step


def replacement(theta: torch.Tensor, out: torch.Tensor) -> Step:
    """Step that replaces the old values by the mean, for buffers, which no optimizer updates."""

    def step(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        return square_distance(out[part].copy_(mean), theta[part], scratch)

    return step


def has_fused_kernel(outer: OuterOptimizer, sync: Sync) -> bool:
    """Whether a job's outer steps are those of the kernel: Nesterov's, on the mean of fp32 weights."""
    is_fp32 = sync.codec == "fp32" and not sync.traits.sends_gradients
    return is_fp32 and (outer.name, sync.merge) == ("nesterov", "mean")


def load_kernel(job: Job, flats: Iterable[Flat]) -> None:
    """Load the kernels of a job's outer steps in the background, if arrays of these sizes use them."""
    if "visible" in (job.sync.codec, job.sync.downward_codec):
        load_ahead("patches", 1)
    if has_fused_kernel(job.outer_optimizer, job.sync):
        largest = 0
        for flat in flats:
            for array in flat.values():
                largest = max(largest, array.size)
        load_ahead("outer", largest)


def fused_step(
    values: Values, weights: Sequence[float], eta: float, mu: float, group: Group, needs_theta: bool, needs_state: bool
) -> Work[list[float]] | None:
    """Work of `merge.sweep` on a block; results are bit-identical to those of `mean` and `outer_step`.

    New θ and new momentum are computed only if `needs_theta` and `needs_state` ask for them.

    Returns:
        The work; None if the values aren't fp32 weights, are too few, or the kernel can't be compiled here.

    """
    are_weights = not (values.relative or values.deltas)
    are_unscaled = all(scale == 1 for scale in values.scales)
    replaces = eta == 1 and mu == 0
    is_supported = values.theta.dtype == torch.float32 and len(group.state) == 1
    if not are_weights or not are_unscaled or replaces or not is_supported:
        return None
    if not is_worth_it("outer", values.theta.numel()):
        return None
    table = portions(shares(weights))
    old_state = group.state[0]
    new_state = group.new_state[0]

    def work(part: slice, _: torch.Tensor, __: torch.Tensor) -> list[float]:
        theta_out = group.new_theta[part] if needs_theta else None
        state_out = new_state[part] if needs_state else None
        block = Averaged(values.read(part), table, group.theta[part], old_state[part], theta_out, state_out)
        return fused_nesterov(eta, mu, block)

    return work


def own_step(outer: OuterOptimizer, eta: float, round: int, group: Group) -> Step:
    """Step of a user's optimizer; it gets copies, so it may write to them."""
    optimizer: Outer = create("outer_optimizers", outer.name, outer.name_options)

    def step(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        theta = group.theta[part]
        theta_out = group.new_theta[part]
        delta = mean.clone() if group.relative else mean - theta
        state = [array[part].clone() for array in group.state]
        state_out = [array[part] for array in group.new_state]
        new_theta, new_state = optimizer.step(theta.clone(), delta, state, eta, round)
        for new_values, out in zip((new_theta, *new_state), (theta_out, *state_out), strict=True):
            require_like(outer.name, new_values, out)
            out.copy_(new_values.detach())
        for array in state_out:
            if not torch.isfinite(array).all():
                return math.inf
        return square_distance(theta_out, theta, scratch)

    return step


class RoundPart(NamedTuple):
    """Share of jointly reduced deltas in their round."""

    portion: float
    """Their weight divided by the round's expected weight."""
    share: float
    """Their weight divided by the weight that has arrived, theirs included."""
    earlier_factor: float
    """Factor that turns the earlier deltas' expected share into their share of the weight that has arrived."""
    closes: bool


def part_of(phase: RoundProgress | None, weights: Sequence[int]) -> RoundPart | None:
    """Share of deltas with these weights in their round; None if a round has only one step."""
    if phase is None:
        return None
    weight = sum(weights)
    arrived = phase.weight + weight
    closes = phase.closes(len(weights))
    return RoundPart(weight / phase.unit, weight / arrived, phase.unit / arrived, closes)


def delayed(
    eta: float, mu: float, group: Group, round_part: RoundPart, old_sum: torch.Tensor | None, new_sum: torch.Tensor
) -> Step:
    """Update θ by a part of the mean delta; the round's last deltas also update momentum.

    Let s be the sum of all parts x·n/N so far. Before the end, s ← s + x·n/N and θ ← θ + η·x·n/N. At the end, with Δ̄
    the weighted mean of all deltas, v ← μv + Δ̄ and θ ← θ + η(Δ̄ − s + μv). The measured change is then the round's.

    `old_sum` is s before the step, None for zeros. The last step leaves `new_sum` as it is.
    """

    def accumulate(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        if group.state:
            group.new_state[0][part].copy_(group.state[0][part])
        if old_sum is None:
            torch.mul(mean, round_part.portion, out=new_sum[part])
        else:
            torch.add(old_sum[part], mean, alpha=round_part.portion, out=new_sum[part])
        change = torch.mul(mean, eta * round_part.portion, out=scratch)
        torch.add(group.theta[part], change, out=group.new_theta[part])
        return square_sum(change)

    def finish(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        new_theta = group.new_theta[part]
        round_mean = mean
        if old_sum is not None:
            round_mean = torch.mul(mean, round_part.share, out=scratch)
            round_mean.add_(old_sum[part], alpha=round_part.earlier_factor)
        velocity = group.next_velocity(round_mean, mu, part)
        change = torch.add(round_mean, velocity, alpha=mu, out=scratch).mul_(eta)
        torch.add(group.theta[part], change, out=new_theta)
        if old_sum is not None:
            new_theta.sub_(old_sum[part], alpha=eta)
        return square_sum(change)

    return finish if round_part.closes else accumulate


def undelayed(eta: float, mu: float, group: Group, round_part: RoundPart) -> Step:
    """A step of Nesterov momentum with every arrival, on x·n/N in place of a round's mean delta."""

    def step(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        delta = torch.mul(mean, round_part.portion, out=scratch)
        velocity = group.next_velocity(delta, mu, part)
        change = torch.add(delta, velocity, alpha=mu, out=scratch).mul_(eta)
        torch.add(group.theta[part], change, out=group.new_theta[part])
        return square_sum(change)

    return step


def blended(theta: torch.Tensor, out: torch.Tensor, share: float) -> Step:
    """Running mean of the buffers that arrived in this round."""

    def step(mean: torch.Tensor, scratch: torch.Tensor, part: slice) -> float:
        running_mean = torch.lerp(theta[part], mean, share, out=out[part])
        return square_distance(running_mean, theta[part], scratch)

    return step
