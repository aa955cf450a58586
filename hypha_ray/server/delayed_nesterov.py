"""Outer step without a barrier: deltas move θ as they arrive, and outer momentum once in a round of them.

That is delayed Nesterov (Liu et al., Async Local-SGD, arXiv 2401.09135, algorithm 3, with c = 0). Its sums make a
round's steps add up to the step of Nesterov momentum on the weighted mean of its deltas, however they are grouped:
the step that ends a round makes up for weights that weren't as expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hypha_ray.server.admission import square_distance, square_sum
from hypha_ray.server.merge import Step
from hypha_ray.server.outer import Group
from hypha_ray.types import RoundProgress

SUM = "sum/"
"""Before a group's name, in the outer state: what θ has been moved by in this round, divided by η."""


class Part(NamedTuple):
    """Share of jointly reduced deltas in their round."""

    portion: float
    """Part of a round's expected weight."""
    share: float
    """Part of the weight that has arrived."""
    before: float
    """Part of the arrived weight that came before, divided by the part assumed for it."""
    closes: bool


def part_of(phase: RoundProgress, weights: Sequence[int]) -> Part:
    """Share of deltas with these weights in their round."""
    weight = sum(weights)
    whole = phase.weight + weight
    return Part(weight / phase.unit, weight / whole, phase.unit / whole, phase.closes(len(weights)))


def delayed(eta: float, mu: float, group: Group, part: Part, moved: tuple[torch.Tensor | None, torch.Tensor]) -> Step:
    """Move θ by a part of the mean delta; with the round's last deltas make the step of momentum, too.

    s is the sum of all parts x·n/N so far. Between: s ← s + x·n/N and θ ← θ + η·x·n/N. At the end, with Δ̄ the weighted
    mean of all deltas: v ← μv + Δ̄ and θ ← θ + η(Δ̄ − s + μv). What is measured as change is the round's then.

    Args:
        eta: outer learning rate.
        mu: outer momentum.
        group: θ and velocity.
        part: what the deltas are of the round.
        moved: s as it was, None for zeros; and where the new one goes, unless the round ends.

    """
    old, new = moved

    def between(mean: torch.Tensor, room: torch.Tensor, part_: slice) -> float:
        if group.state:
            group.new_state[0][part_].copy_(group.state[0][part_])
        if old is None:
            torch.mul(mean, part.portion, out=new[part_])
        else:
            torch.add(old[part_], mean, alpha=part.portion, out=new[part_])
        change = torch.mul(mean, eta * part.portion, out=room)
        torch.add(group.theta[part_], change, out=group.new_theta[part_])
        return square_sum(change)

    def at_the_end(mean: torch.Tensor, room: torch.Tensor, part_: slice) -> float:
        before, after = group.theta[part_], group.new_theta[part_]
        whole = mean if old is None else torch.mul(mean, part.share, out=room).add_(old[part_], alpha=part.before)
        velocity = whole
        if group.state:
            velocity = torch.mul(group.state[0][part_], mu, out=group.new_state[0][part_]).add_(whole)
        change = torch.add(whole, velocity, alpha=mu, out=room).mul_(eta)
        torch.add(before, change, out=after)
        if old is not None:
            after.sub_(old[part_], alpha=eta)
        return square_sum(change)

    return at_the_end if part.closes else between


def undelayed(eta: float, mu: float, group: Group, part: Part) -> Step:
    """A step of Nesterov momentum with every arrival: x·n/N stands where a round has its mean delta."""

    def step(mean: torch.Tensor, room: torch.Tensor, part_: slice) -> float:
        delta = torch.mul(mean, part.portion, out=room)
        velocity = delta
        if group.state:
            velocity = torch.mul(group.state[0][part_], mu, out=group.new_state[0][part_]).add_(delta)
        change = torch.add(delta, velocity, alpha=mu, out=room).mul_(eta)
        torch.add(group.theta[part_], change, out=group.new_theta[part_])
        return square_sum(change)

    return step


def blended(theta: torch.Tensor, out: torch.Tensor, share: float) -> Step:
    """Buffers are the running mean of those that came in this round."""

    def step(mean: torch.Tensor, room: torch.Tensor, part_: slice) -> float:
        return square_distance(torch.lerp(theta[part_], mean, share, out=out[part_]), theta[part_], room)

    return step
