"""The outer step in one pass, beside torch: the same bits, and norms that agree."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hypha_ray.config.training import OuterOptimizer
from hypha_ray.kernels import LEAST, Averaged, nesterov, portions
from hypha_ray.server.merge import fold, shares
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, reduce
from hypha_ray.types import Entry, Layout

pytestmark = pytest.mark.usefixtures("compiled_steps")

SIZES = (1, 15, 4096, 3 * 4096 + 17)
GROUP = "parameters/float32"


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEAST, "outer", 1 << 60)


def values(size: int, seed: int) -> torch.Tensor:
    """Of all magnitudes, zeros of both signs and what isn't finite among them."""
    rng = np.random.default_rng(seed)
    array = (rng.standard_normal(size) * 10.0 ** rng.integers(-20, 15, size)).astype(np.float32)
    for place, odd in enumerate((0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, 1e-40)):
        array[(7 * place + seed) % size] = odd
    return torch.from_numpy(array)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("samples", [(1,), (1, 1), (3, 1), (1, 3), (2, 2, 2), (5, 1, 9, 2)])
@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.9), (1.0, 0.9), (0.3, 0.0), (1.0, 1.0)])
def test_one_pass_gives_operation_by_operation_the_bits_of_torch(
    size: int, samples: tuple[int, ...], eta: float, mu: float
) -> None:
    theta, velocity, *workers = (values(size, seed) for seed in range(2 + len(samples)))
    mean: torch.Tensor | None = None
    for value, share in zip(workers, shares(samples), strict=True):
        mean = fold(mean, value, share, torch.empty(size))
    assert mean is not None
    delta = mean - theta
    faster = torch.mul(velocity, mu).add_(delta)
    after = torch.add(theta, torch.add(delta, faster, alpha=mu), alpha=eta)
    new, new_velocity = torch.empty(size), torch.empty(size)
    norms = nesterov(eta, mu, Averaged(workers, portions(shares(samples)), theta, velocity, new, new_velocity))
    for found, exact in ((new, after), (new_velocity, faster)):
        assert np.array_equal(found.numpy(), exact.numpy(), equal_nan=True)
        numbers = ~exact.isnan()
        assert torch.equal(found.signbit()[numbers], exact.signbit()[numbers])
    for norm, value in zip(norms, [*workers, after], strict=True):
        assert math.isfinite(norm) == torch.isfinite(value - theta).all().item()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("size", SIZES)
def test_norms_of_any_scale_are_exact_to_six_digits(scale: float, size: int) -> None:
    rng = np.random.default_rng(size)
    one, other, velocity = (torch.from_numpy((rng.standard_normal(size) * scale).astype(np.float32)) for _ in range(3))
    new = torch.empty(size)
    found = nesterov(0.7, 0.9, Averaged([one], portions([1.0]), other, velocity, new, None))
    for norm, value in zip(found, (one, new), strict=True):
        exact = float(((value - other).double() ** 2).sum())
        assert norm == pytest.approx(exact, rel=1e-6, abs=0)


def test_what_is_not_wanted_is_not_written() -> None:
    theta, velocity, worker = (values(5000, seed) for seed in range(3))
    block = Averaged([worker], portions([1.0]), theta, velocity, torch.empty(5000), torch.empty(5000))
    norms = nesterov(0.7, 0.9, block)
    assert block.new_theta is not None and block.new_velocity is not None
    new, state = torch.zeros(5000), torch.zeros(5000)
    assert nesterov(0.7, 0.9, block._replace(new_theta=new, new_velocity=None)) == pytest.approx(norms, nan_ok=True)
    assert nesterov(0.7, 0.9, block._replace(new_theta=None, new_velocity=state)) == pytest.approx(norms, nan_ok=True)
    assert new.numpy().tobytes() == block.new_theta.numpy().tobytes()
    assert state.numpy().tobytes() == block.new_velocity.numpy().tobytes()


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_reduce_with_and_without_numba_gives_the_same_bits(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 300_007
    rng = np.random.default_rng(workers)
    theta, momentum, *rest = ({GROUP: rng.standard_normal(size, dtype=np.float32)} for _ in range(2 + workers))
    received = [Received(worker, 0, 3 + worker, flat) for worker, flat in enumerate(rest)]
    rules = ReduceSpec(Layout((Entry("w", "float32", (size,), 0, GROUP, 0, size),)), 0, OuterOptimizer())
    fast = reduce(0, theta, momentum, received, rules)
    plainly(monkeypatch)
    slow = reduce(0, theta, momentum, received, rules)
    assert fast[0][GROUP].tobytes() == slow[0][GROUP].tobytes()
    assert fast[1][GROUP].tobytes() == slow[1][GROUP].tobytes()
    assert fast[2].update_norm == pytest.approx(slow[2].update_norm, rel=1e-6)
    norms = [[one.norm for one in result[2].accepted] for result in (fast, slow)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_theta_and_state_apart_are_those_of_one_reduction() -> None:
    size = 600_011
    rng = np.random.default_rng(7)
    theta, momentum, *rest = ({GROUP: rng.standard_normal(size, dtype=np.float32)} for _ in range(5))
    received = [Received(worker, 0, 3 + worker, flat) for worker, flat in enumerate(rest)]
    rules = ReduceSpec(Layout((Entry("w", "float32", (size,), 0, GROUP, 0, size),)), 0, OuterOptimizer(), threads=2)
    whole = reduce(0, theta, momentum, received, rules)
    first = reduce(0, theta, momentum, received, replace(rules, outputs="theta"))
    then = reduce(0, theta, momentum, received, replace(rules, outputs="state"))
    assert first[0][GROUP].tobytes() == whole[0][GROUP].tobytes() and first[1] == {}
    assert then[1][GROUP].tobytes() == whole[1][GROUP].tobytes()
    assert whole[2] == first[2] == then[2]
