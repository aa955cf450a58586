"""Optimizers that step on all parameters of a group together: base class, and AdamW for one of several workers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch


class GroupOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is given by what it does to a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step on the gradients that are there; a closure isn't called."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step(group, parameters, [parameter.grad for parameter in parameters])

    @abstractmethod
    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None: ...


class FleetAdamW(GroupOptimizer):
    """AdamW with steps as long as on the mean gradient of K workers.

    Where gradients are mostly noise, Adam's second moment is mostly the noise's variance σ². That of the mean of K
    gradients is a K-th, so synchronous training takes longer steps at the same rate. Here v is lessened by
    (1 − 1/K) σ², with σ² = (v − m²) / (1 − c) by this worker's own averages. c is the part of the noise that is left in
    m. Never is it less than v/K. With K = 1 this is `torch.optim.AdamW`, and its state has the same names.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of both averages.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as in AdamW.
        workers: K.

    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        workers: int = 1,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "workers": workers}
        super().__init__(params, options)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        rate, (first, second), workers = group["lr"], group["betas"], group["workers"]
        states = [self._state(parameter) for parameter in parameters]
        means = [one["exp_avg"] for one in states]
        squares = [one["exp_avg_sq"] for one in states]
        for state in states:
            state["step"] += 1
        steps = [int(state["step"]) for state in states]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        unbiased = torch._foreach_div(means, [1 - first**n for n in steps])
        moment = torch._foreach_div(squares, [1 - second**n for n in steps])
        least = torch._foreach_div(moment, workers)
        parts = [(1 - 1 / workers) / (1 - _noise_left(first, n)) if n > 1 else 0.0 for n in steps]
        torch._foreach_mul_(moment, [1 - part for part in parts])
        torch._foreach_addcmul_(moment, unbiased, unbiased, parts)
        torch._foreach_maximum_(moment, least)
        torch._foreach_sqrt_(moment)
        torch._foreach_add_(moment, group["eps"])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, unbiased, moment, -rate)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


def _noise_left(decay: float, steps: int) -> float:
    """Variance of a corrected running average of independent values, over theirs."""
    return (1 - decay) / (1 + decay) * (1 + decay**steps) / (1 - decay**steps)
