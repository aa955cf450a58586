"""Outer step without a barrier: deltas update θ as they arrive, and outer momentum once per round.

This is delayed Nesterov (Liu et al., Async Local-SGD, arXiv 2401.09135, algorithm 3, with c = 0). The steps of a round
add up to one step of Nesterov momentum on the weighted mean of its deltas, however they are grouped. The round's last
step corrects for weights that differed from the expected ones.
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
"""Prefix of a group's name in the outer state: the change of θ so far in this round, divided by η."""


class Part(NamedTuple):
    """Share of jointly reduced deltas in their round."""

    portion: float
    """Their weight divided by the round's expected weight."""
    share: float
    """Their weight divided by the weight that has arrived, theirs included."""
    before: float
    """Factor that turns the earlier deltas' expected share into their share of the weight that has arrived."""
    closes: bool


def part_of(phase: RoundProgress, weights: Sequence[int]) -> Part:
    """Share of deltas with these weights in their round."""
    weight = sum(weights)
    whole = phase.weight + weight
    return Part(weight / phase.unit, weight / whole, phase.unit / whole, phase.closes(len(weights)))


def delayed(eta: float, mu: float, group: Group, part: Part, moved: tuple[torch.Tensor | None, torch.Tensor]) -> Step:
    """Update θ by a part of the mean delta; the round's last deltas also update momentum.

    Let s be the sum of all parts x·n/N so far. Before the end, s ← s + x·n/N and θ ← θ + η·x·n/N. At the end, with Δ̄
    the weighted mean of all deltas, v ← μv + Δ̄ and θ ← θ + η(Δ̄ − s + μv). The measured change is then the round's.

    Args:
        eta: outer learning rate.
        mu: outer momentum.
        group: θ and velocity.
        part: share of the deltas in the round.
        moved: s before the step, None for zeros; and the array for s after it, which the last step leaves as it is.

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
        before = group.theta[part_]
        after = group.new_theta[part_]
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
    """A step of Nesterov momentum with every arrival, on x·n/N in place of a round's mean delta."""

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
    """Running mean of the buffers that arrived in this round."""

    def step(mean: torch.Tensor, room: torch.Tensor, part_: slice) -> float:
        return square_distance(torch.lerp(theta[part_], mean, share, out=out[part_]), theta[part_], room)

    return step
