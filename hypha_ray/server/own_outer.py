"""Outer optimizers that users bring: classes that step on a block of parameters at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from hypha_ray.config.tables.optimizers import OuterOptimizer
from hypha_ray.plugins import create
from hypha_ray.server.admission import square_distance
from hypha_ray.server.groups import Group
from hypha_ray.server.merge import Step


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
        ...


def own_step(outer: OuterOptimizer, eta: float, round: int, group: Group) -> Step:
    """Step of a user's optimizer; it gets copies, so it may write to them."""
    optimizer: Outer = create("outer_optimizers", outer.name, outer.name_options)

    def step(mean: torch.Tensor, room: torch.Tensor, part: slice) -> float:
        before = group.theta[part]
        after = group.new_theta[part]
        delta = mean.clone() if group.relative else mean - before
        state = [array[part].clone() for array in group.state]
        theta, new_state = optimizer.step(before.clone(), delta, state, eta, round)
        for values, out in zip((theta, *new_state), (after, *(new[part] for new in group.new_state)), strict=True):
            if values.shape != out.shape:
                raise ValueError(f"{outer.name} gave shape {tuple(values.shape)} for {tuple(out.shape)}")
            out.copy_(values)
        is_finite = all(bool(torch.isfinite(new[part]).all()) for new in group.new_state)
        return square_distance(after, before, room) if is_finite else math.inf

    return step


def try_outer(name: str, options: Mapping[str, Any] | None) -> None:
    """Take two steps on a few parameters, whole and in two blocks, which have to be equal.

    Raises:
        ValueError: a step depends on other elements, or gives values that aren't finite.

    """
    outer = OuterOptimizer(name=name, name_options=None if options is None else dict(options))
    slots = len(create("outer_optimizers", name, options).slots)
    theta, delta = (torch.randn(8, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    results = []
    for parts in ([slice(0, 8)], [slice(0, 3), slice(3, 8)]):
        old = theta.clone()
        state = [torch.zeros(8) for _ in range(slots)]
        for round in range(2):
            group = Group(old, state, torch.empty(8), [torch.empty(8) for _ in range(slots)], relative=True)
            step = own_step(outer, 0.5, round, group)
            changes = [step(delta[part], torch.empty(8)[part], part) for part in parts]
            if not all(map(math.isfinite, changes)):
                raise ValueError("a step on finite values gives some that aren't")
            old = group.new_theta
            state = list(group.new_state)
        results.append([old, *state])
    if not all(map(torch.equal, *results)):
        raise ValueError("a step depends on other elements of the parameters than its own")
