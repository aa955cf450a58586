"""Muon that orthogonalizes matrices of one shape together."""

from __future__ import annotations

import math
from typing import Any

import torch

from hypha_ray.optim.group_optimizer import GroupOptimizer

TOGETHER = 1 << 24
"""Most elements that are orthogonalized at once: what is more gains nothing by company, and takes memory."""
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Jordan's quintic: the steepest at zero of those that keep singular values between about 0.7 and 1.2."""
_ITERATIONS = 5
_LEAST_NORM = 1e-7


class Muon(GroupOptimizer):
    """`torch.optim.Muon` (Jordan 2024) with a call for each shape instead of one for each matrix.

    Small matrices cost what the calls cost, so a step is several times as fast. On CPUs it computes in float32,
    since most have no units for bfloat16. Steps have the length √max(1, outputs/inputs).

    Args:
        params: matrices, or groups of them; a group's `sideways` says that rows are inputs, as in GPT-2.
        lr: learning rate.
        momentum: decay of the average of gradients, with Nesterov's look ahead.
        weight_decay: decoupled.

    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "sideways": False}
        super().__init__(params, options)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        averages = [self._average(parameter) for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, averages, group["momentum"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for members in _alike(parameters):
            steps = orthogonal(torch.stack([ahead[member] for member in members]))
            rows, columns = steps.shape[1:]
            changed = [parameters[member] for member in members]
            rate = group["lr"] * math.sqrt(max(1.0, columns / rows if group["sideways"] else rows / columns))
            torch._foreach_add_(changed, steps.to(changed[0].dtype).unbind(), alpha=-rate)

    def _average(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices of shape (count, rows, columns), all singular values near 1 and their vectors as they were.

    Five Newton-Schulz iterations, in bfloat16 on GPUs and in float32 elsewhere.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def _alike(parameters: list[torch.Tensor]) -> list[list[int]]:
    """Places of matrices that are orthogonalized together: of one shape, and not too much at once."""
    found: dict[torch.Size, list[list[int]]] = {}
    for place, parameter in enumerate(parameters):
        companies = found.setdefault(parameter.shape, [[]])
        if companies[-1] and (len(companies[-1]) + 1) * parameter.numel() > TOGETHER:
            companies.append([])
        companies[-1].append(place)
    return [members for companies in found.values() for members in companies]
