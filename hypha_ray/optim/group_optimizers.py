"""Optimizers that step on all parameters of a group together: base class, and AdamW for one of several workers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch


class GroupOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that are given by the step of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step on all parameters that have a gradient; a closure isn't called."""
        for group in self.param_groups:
            parameters: list[torch.Tensor] = []
            gradients: list[torch.Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameters.append(parameter)
                    gradients.append(parameter.grad)
            if parameters:
                self._step(group, parameters, gradients)

    @abstractmethod
    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None: ...


class FleetAdamW(GroupOptimizer):
    """AdamW with steps as long as on the mean gradient of K workers.

    If gradients are mostly noise, Adam's second moment v is mostly the noise's variance σ². The mean of K gradients has
    a K-th of that variance, so synchronous training takes longer steps at the same rate. Here v is reduced by
    (1 − 1/K) σ², but not below v/K. σ² = (v − m²) / (1 − c) by this worker's own averages, where c is the part of the
    noise that is left in m. With K = 1 this is `torch.optim.AdamW`, and its state has the same names.
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
        rate = group["lr"]
        beta1, beta2 = group["betas"]
        means: list[torch.Tensor] = []
        squares: list[torch.Tensor] = []
        mean_corrections: list[float] = []
        square_corrections: list[float] = []
        reductions: list[float] = []
        for parameter in parameters:
            state = self._state(parameter)
            state["step"] += 1
            steps = int(state["step"])
            means.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            mean_corrections.append(1 - beta1**steps)
            square_corrections.append(1 - beta2**steps)
            reductions.append(_reduction(group["workers"], beta1, steps))
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        unbiased = torch._foreach_div(means, mean_corrections)
        moment = torch._foreach_div(squares, square_corrections)
        least = torch._foreach_div(moment, group["workers"])
        torch._foreach_mul_(moment, [1 - reduction for reduction in reductions])
        torch._foreach_addcmul_(moment, unbiased, unbiased, reductions)
        torch._foreach_maximum_(moment, least)
        torch._foreach_sqrt_(moment)
        torch._foreach_add_(moment, group["eps"])
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, unbiased, moment, -rate)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _reduction(workers: int, beta1: float, steps: int) -> float:
    """Return the factor of v − m² by which v is reduced: (1 − 1/K) / (1 − c); 0 in the first step, where c is 1."""
    if steps <= 1:
        return 0.0
    return (1 - 1 / workers) / (1 - _noise_left(beta1, steps))


def _noise_left(decay: float, steps: int) -> float:
    """Return the variance of a corrected running average of independent values, relative to their own variance."""
    return (1 - decay) / (1 + decay) * (1 + decay**steps) / (1 - decay**steps)
