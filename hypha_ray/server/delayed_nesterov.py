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


class RoundPart(NamedTuple):
    """Share of jointly reduced deltas in their round."""

    portion: float
    """Their weight divided by the round's expected weight."""
    share: float
    """Their weight divided by the weight that has arrived, theirs included."""
    before: float
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
        after = group.new_theta[part]
        round_mean = mean
        if old_sum is not None:
            round_mean = torch.mul(mean, round_part.share, out=scratch)
            round_mean.add_(old_sum[part], alpha=round_part.before)
        velocity = group.next_velocity(round_mean, mu, part)
        change = torch.add(round_mean, velocity, alpha=mu, out=scratch).mul_(eta)
        torch.add(group.theta[part], change, out=after)
        if old_sum is not None:
            after.sub_(old_sum[part], alpha=eta)
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
