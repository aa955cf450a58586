"""Outer optimizers, which update the global weights by the workers' mean."""

from __future__ import annotations

import inspect
import math

import torch

from hypha_ray.config.tables.optimizers import OuterOptimizer
from hypha_ray.plugins import find
from hypha_ray.server.admission import square_distance, square_sum
from hypha_ray.server.groups import Group
from hypha_ray.server.merge import Step
from hypha_ray.server.own_outer import own_step

SLOTS: dict[str, tuple[str, ...]] = {"nesterov": ("",), "average": (), "adam": ("first/", "second/")}
"""State arrays of a group of parameters, by built-in optimizer: prefixes of the group's name."""


def slots_of(outer: OuterOptimizer | str) -> tuple[str, ...]:
    """State arrays of a group of parameters: prefixes of the group's name."""
    name = outer if isinstance(outer, str) else outer.name
    if name in SLOTS:
        return SLOTS[name]
    return tuple(f"{slot}/" for slot in find("outer_optimizers", name).slots)


def outer_step(outer: OuterOptimizer, eta: float, round: int, group: Group) -> Step:
    """Step of the job's outer optimizer, with the round's learning rate η."""
    member = find("outer_optimizers", outer.name)
    if inspect.isclass(member):
        return own_step(outer, eta, round, group)
    made: Step = member(outer, eta, round, group)
    return made


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

    def step(mean: torch.Tensor, room: torch.Tensor, part: slice) -> float:
        before = group.theta[part]
        after = group.new_theta[part]
        plain = eta == 1 and mu == 0 and not group.relative
        delta = mean if group.relative else torch.sub(mean, before, out=room)
        velocity = delta
        if group.state:
            velocity = torch.mul(group.state[0][part], mu, out=group.new_state[0][part]).add_(delta)
        if plain:
            after.copy_(mean)
        else:
            torch.add(before, torch.add(delta, velocity, alpha=mu, out=room), alpha=eta, out=after)
        return square_distance(after, before, room)

    return step


def adam(outer: OuterOptimizer, eta: float, round: int, group: Group) -> Step:
    """FedAdam (arXiv 2003.00295) with bias correction: `torch.optim.Adam` with the gradient −Δ̄."""
    (first, second), epsilon = outer.betas, outer.epsilon
    corrections = 1 - first ** (round + 1), 1 - second ** (round + 1)

    def step(mean: torch.Tensor, room: torch.Tensor, part: slice) -> float:
        before = group.theta[part]
        after = group.new_theta[part]
        delta = mean if group.relative else torch.sub(mean, before, out=room)
        mean_of, mean_of_squares = (new[part] for new in group.new_state)
        torch.lerp(group.state[0][part], delta, 1 - first, out=mean_of)
        torch.mul(group.state[1][part], second, out=mean_of_squares).addcmul_(delta, delta, value=1 - second)
        root = torch.sqrt(mean_of_squares, out=room).div_(math.sqrt(corrections[1])).add_(epsilon)
        torch.addcdiv(before, mean_of, root, value=eta / corrections[0], out=after)
        return square_distance(after, before, room)

    return step


def collection(out: torch.Tensor) -> Step:
    """Step that stores the mean, for an optimizer that needs it whole."""

    def step(mean: torch.Tensor, room: torch.Tensor, part: slice) -> float:
        return square_sum(out[part].copy_(mean))

    return step


def replacement(theta: torch.Tensor, out: torch.Tensor) -> Step:
    """Step that replaces the old values by the mean, for buffers, which no optimizer updates."""

    def step(mean: torch.Tensor, room: torch.Tensor, part: slice) -> float:
        return square_distance(out[part].copy_(mean), theta[part], room)

    return step
