"""AdamW for one of several workers, from its first step on, held against its own definition in plain arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hypha_ray.optim.torch_extras import FleetAdamW


def noise_left(decay: float, steps: int) -> float:
    """Variance of a corrected running average of so many independent values of variance 1: its weights' squares."""
    weights = [(1 - decay) * decay ** (steps - n) / (1 - decay**steps) for n in range(1, steps + 1)]
    assert math.isclose(sum(weights), 1.0)
    return sum(weight**2 for weight in weights)


def by_hand(start: float, gradients: list[float], workers: int, rate: float, betas: tuple[float, float]) -> list[float]:
    """The weight after each step, by the class's description."""
    weight, mean, square, found = start, 0.0, 0.0, []
    for n, gradient in enumerate(gradients, 1):
        mean = betas[0] * mean + (1 - betas[0]) * gradient
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        m, v = mean / (1 - betas[0] ** n), square / (1 - betas[1] ** n)
        noise = 0.0 if n == 1 else (v - m**2) / (1 - noise_left(betas[0], n))  # One value has no noise.
        lessened = max(v - (1 - 1 / workers) * noise, v / workers)
        weight -= rate * m / (math.sqrt(lessened) + 1e-8)
        found.append(weight)
    return found


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.5, 0.999), (0.95, 0.99)])
def test_every_step_from_the_first_on_is_as_long_as_described(workers: int, betas: tuple[float, float]) -> None:
    for seed in range(5):
        gradients = (0.3 + np.random.default_rng(seed).standard_normal(12)).tolist()
        parameter = torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float64))
        optimizer = FleetAdamW([parameter], lr=0.1, betas=betas, workers=workers)
        found = []
        for gradient in gradients:
            parameter.grad = torch.tensor([gradient], dtype=torch.float64)
            optimizer.step()
            found.append(parameter.item())
        assert found == pytest.approx(by_hand(1.5, gradients, workers, 0.1, betas), rel=1e-9)
