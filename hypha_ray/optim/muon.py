"""Muon that orthogonalizes matrices of one shape together."""

from __future__ import annotations

import math
from typing import Any

import torch

from hypha_ray.optim.together import GroupOptimizer

TOGETHER = 1 << 24
"""Most elements that are orthogonalized at once: what is more gains nothing by company, and takes memory."""
_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Jordan's quintic: the steepest at zero of those that keep singular values between about 0.7 and 1.2."""
_ITERATIONS = 5
_LEAST_NORM = 1e-7
_POWERS = 5


class Muon(GroupOptimizer):
    """`torch.optim.Muon` (Jordan 2024) with a call for each shape instead of one for each matrix.

    Small matrices cost what the calls cost, so a step is several times as fast; and on CPUs it computes in float32,
    since most have no units for bfloat16. Steps have the length √max(1, outputs/inputs).

    The mean gradient of K workers has a K-th of the noise's variance. So where there is more noise than signal, in all
    but the greatest singular values, it gets √K times as far as each of them does alone; see `orthogonal`.

    Args:
        params: matrices, or groups of them; a group's `sideways` says that rows are inputs, as in GPT-2.
        lr: learning rate.
        momentum: decay of the average of gradients, with Nesterov's look ahead.
        weight_decay: decoupled.
        workers: how many there are whose steps are averaged; 1: steps are what they are.

    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.0, workers: int = 1
    ) -> None:
        self._lift = math.sqrt(workers) - 1
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "sideways": False}
        super().__init__(params, options)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        averages = [self._average(parameter) for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, averages, group["momentum"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for members in _alike(parameters):
            steps = orthogonal(torch.stack([ahead[member] for member in members]), self._lift)
            rows, columns = steps.shape[1:]
            changed = [parameters[member] for member in members]
            rate = group["lr"] * math.sqrt(max(1.0, columns / rows if group["sideways"] else rows / columns))
            torch._foreach_add_(changed, steps.to(changed[0].dtype).unbind(), alpha=-rate)

    def _average(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonal(matrices: torch.Tensor, lift: float = 0.0) -> torch.Tensor:
    """Matrices of shape (count, rows, columns), all singular values near 1 and their vectors as they were.

    Five Newton-Schulz iterations, in bfloat16 on GPUs and in float32 elsewhere.

    Args:
        matrices: what is to be orthogonalized.
        lift: what small singular values get more than 1; s gets 1 + lift · (1 − s²/s₁²), where s₁ is the greatest.

    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_LEAST_NORM)
    squares = None
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        squares = gram if squares is None else squares
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    if lift and squares is not None:
        x = torch.baddbmm(x, squares / _greatest(squares), x, beta=1 + lift, alpha=-lift)
    return x.mT if tall else x


def _greatest(squares: torch.Tensor) -> torch.Tensor:
    """The greatest eigenvalue of each of these symmetric matrices, shape (count, 1, 1), by power iteration."""
    vector = squares.sum(2, keepdim=True)
    for _ in range(_POWERS):
        vector = squares @ (vector / torch.linalg.matrix_norm(vector, keepdim=True).clamp(min=_LEAST_NORM))
    norms: torch.Tensor = torch.linalg.matrix_norm(vector, keepdim=True)
    return norms.clamp(min=_LEAST_NORM)


def _alike(parameters: list[torch.Tensor]) -> list[list[int]]:
    """Places of matrices that are orthogonalized together: of one shape, and not too much at once."""
    found: dict[torch.Size, list[list[int]]] = {}
    for place, parameter in enumerate(parameters):
        companies = found.setdefault(parameter.shape, [[]])
        if companies[-1] and (len(companies[-1]) + 1) * parameter.numel() > TOGETHER:
            companies.append([])
        companies[-1].append(place)
    return [members for companies in found.values() for members in companies]
