"""What numba compiles, beside torch: the same bits, and norms that agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hypha_ray.config.schema import OuterOptimizer
from hypha_ray.server import kernels
from hypha_ray.server.gates import Received
from hypha_ray.server.kernels import Move, lerp, nesterov, square_distance
from hypha_ray.server.reducer import Rules, reduce
from hypha_ray.types import Entry, Layout

SIZES = (1, 15, 4096, 3 * 4096 + 17)
GROUP = "parameters/float32"


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiled", None)


def values(size: int, seed: int) -> torch.Tensor:
    """Of all magnitudes, zeros of both signs and what isn't finite among them."""
    rng = np.random.default_rng(seed)
    array = (rng.standard_normal(size) * 10.0 ** rng.integers(-20, 15, size)).astype(np.float32)
    for place, odd in enumerate((0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, 1e-40)):
        array[(7 * place + seed) % size] = odd
    return torch.from_numpy(array)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight", [0.5, 0.6, 2 / 3, 0.75, 0.9, 0.999])
def test_lerp_is_that_of_torch_to_the_bit(size: int, weight: float) -> None:
    start, end = values(size, 1), values(size, 2)
    found, exact = lerp(start, end, weight, torch.empty(size)), torch.lerp(start, end, weight)
    assert np.array_equal(found.numpy(), exact.numpy(), equal_nan=True)
    numbers = ~exact.isnan()
    assert torch.equal(found.signbit()[numbers], exact.signbit()[numbers])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.9), (1.0, 0.9), (0.3, 0.0), (1.0, 1.0)])
def test_nesterov_is_operation_by_operation_that_of_torch_to_the_bit(size: int, eta: float, mu: float) -> None:
    mean, theta, velocity = (values(size, seed) for seed in (3, 4, 5))
    new, new_velocity, room = (torch.empty(size) for _ in range(3))
    change = nesterov(eta, mu, Move(mean, theta, velocity, new, new_velocity), room)
    delta = mean - theta
    faster = torch.mul(velocity, mu).add_(delta)
    after = torch.add(theta, torch.add(delta, faster, alpha=mu), alpha=eta)
    assert np.array_equal(new_velocity.numpy(), faster.numpy(), equal_nan=True)
    assert np.array_equal(new.numpy(), after.numpy(), equal_nan=True)
    assert change is not None and math.isfinite(change) == torch.isfinite(after - theta).all().item()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("size", SIZES)
def test_square_distance_of_any_scale_is_exact_to_six_digits(scale: float, size: int) -> None:
    rng = np.random.default_rng(size)
    one, other = ((rng.standard_normal(size) * scale).astype(np.float32) for _ in range(2))
    exact = float(((one - other).astype(np.float64) ** 2).sum())
    found = square_distance(torch.from_numpy(one), torch.from_numpy(other), torch.empty(size))
    assert found == pytest.approx(exact, rel=1e-6, abs=0)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_reduce_with_and_without_numba_gives_the_same_bits(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 300_007
    rng = np.random.default_rng(workers)
    theta, momentum, *rest = ({GROUP: rng.standard_normal(size, dtype=np.float32)} for _ in range(2 + workers))
    received = [Received(worker, 0, 3 + worker, flat) for worker, flat in enumerate(rest)]
    rules = Rules(Layout((Entry("w", "float32", (size,), 0, GROUP, 0, size),)), 0, OuterOptimizer())
    fast = reduce(0, theta, momentum, received, rules)
    plainly(monkeypatch)
    slow = reduce(0, theta, momentum, received, rules)
    assert fast[0][GROUP].tobytes() == slow[0][GROUP].tobytes()
    assert fast[1][GROUP].tobytes() == slow[1][GROUP].tobytes()
    assert fast[2].update_norm == pytest.approx(slow[2].update_norm, rel=1e-6)
    norms = [[one.norm for one in result[2].accepted] for result in (fast, slow)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
