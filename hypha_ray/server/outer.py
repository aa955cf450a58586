"""The outer optimizer: what becomes of the global weights once the workers' mean is known."""

from __future__ import annotations

import torch

from hypha_ray.config.schema import OuterOptimizer
from hypha_ray.server.merge import Step


def nesterov(
    outer: OuterOptimizer,
    theta: torch.Tensor,
    momentum: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    relative: bool,
) -> Step:
    """Nesterov momentum on the mean delta, as DiLoCo does (arXiv 2311.08105, algorithm 1).

    v ← μv + Δ̄; θ ← θ + η(μv + Δ̄), operation by operation what `torch.optim.SGD(nesterov=True)` does with the gradient
    −Δ̄. With η = 1 and μ = 0 the new θ is the workers' mean itself, bit for bit.

    Args:
        outer: η and μ.
        theta: global weights θ, never written to.
        momentum: v, never written to.
        out: where new θ and v go.
        relative: the mean is one of deltas, not of weights.

    """
    eta, mu = outer.learning_rate, outer.momentum
    new_theta, new_momentum = out

    def step(mean: torch.Tensor, spare: torch.Tensor, part: slice) -> torch.Tensor:
        before, after = theta[part], new_theta[part]
        delta = mean if relative else torch.sub(mean, before, out=spare)
        velocity = torch.mul(momentum[part], mu, out=new_momentum[part]).add_(delta)
        if eta == 1 and mu == 0 and not relative:
            after.copy_(mean)
        else:
            torch.add(before, torch.add(delta, velocity, alpha=mu, out=spare), alpha=eta, out=after)
        return torch.sub(after, before, out=spare)

    return step


def collection(out: torch.Tensor) -> Step:
    """The mean is put down for an optimizer that needs all of it."""

    def step(mean: torch.Tensor, spare: torch.Tensor, part: slice) -> torch.Tensor:
        return out[part].copy_(mean)

    return step


def replacement(theta: torch.Tensor, out: torch.Tensor) -> Step:
    """The mean takes the place of what was there: for buffers, which no optimizer steps."""

    def step(mean: torch.Tensor, spare: torch.Tensor, part: slice) -> torch.Tensor:
        return torch.sub(out[part].copy_(mean), theta[part], out=spare)

    return step
