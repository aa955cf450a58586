"""Muon with a call for each shape: the same as torch's, matrix by matrix."""

from __future__ import annotations

import pytest
import torch

from hypha_ray.optim import muon
from hypha_ray.optim.muon import Muon, orthogonal

SHAPES = [(6, 6), (4, 12), (12, 4), (6, 6), (4, 12), (4, 12)]


def matrices(seed: int) -> list[torch.nn.Parameter]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in SHAPES]


def stepped(optimizer: type[torch.optim.Optimizer], missing: int | None = None) -> list[torch.nn.Parameter]:
    """Matrices after five steps; one of them may have no gradient in the third."""
    parameters = matrices(0)
    one = optimizer(parameters, lr=0.1, weight_decay=0.2)  # type: ignore[call-arg]
    for step in range(5):
        for place, (parameter, gradient) in enumerate(zip(parameters, matrices(1 + step), strict=True)):
            parameter.grad = None if step == 2 and place == missing else gradient.detach()
        one.step()
    return parameters


@pytest.mark.parametrize("missing", [None, 0, 4])
@pytest.mark.parametrize("together", [1, 2 * 48, 1 << 24])
def test_steps_are_those_of_torch(missing: int | None, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "TOGETHER", together)
    for ours, theirs in zip(stepped(Muon, missing), stepped(torch.optim.Muon, missing), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)  # Theirs computes in bfloat16.
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 32, 8), (1, 16, 16)])
def test_singular_values_come_near_one_and_their_vectors_stay(shape: tuple[int, int, int]) -> None:
    before = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    left, _, right = torch.linalg.svd(before, full_matrices=False)
    turned = left.mT @ orthogonal(before) @ right.mT
    values = turned.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6 and values.max() < 1.3
    torch.testing.assert_close(turned, torch.diag_embed(values), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 32, 8), (2, 16, 16)])
def test_lift_lengthens_steps_where_singular_values_are_small(shape: tuple[int, int, int]) -> None:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    values = torch.logspace(0, -2, min(shape[1:])).expand(shape[0], -1)
    before = left * values[:, None] @ right
    factors = (left.mT @ orthogonal(before, 1.0) @ right.mT).diagonal(dim1=-2, dim2=-1)
    plain = (left.mT @ orthogonal(before) @ right.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(factors, plain * (2 - values**2), rtol=0.02, atol=0)


def test_workers_aware_of_each_other_go_as_far_together_as_one_on_the_mean_gradient() -> None:
    """A strong direction, and a weak one in noise, of which workers have twice as much as the mean of four."""
    workers, size, steps = 4, 24, 60
    ways = torch.zeros(3, 2)
    for seed in range(6):
        drawn = torch.Generator().manual_seed(seed)
        strong, weak = (torch.linalg.qr(torch.randn(size, 2, generator=drawn)).Q.T for _ in range(2))
        signal = 40 * torch.outer(*strong) + 0.2 * torch.outer(*weak)
        noise = torch.randn(steps, workers, size, size, generator=drawn)
        for row, (of, parts) in enumerate([(1, [noise.mean(1)]), (workers, noise.unbind(1)), (1, noise.unbind(1))]):
            way = torch.stack([travelled(signal + part, of) for part in parts]).mean(0)
            ways[row] += torch.stack([to @ way @ too for to, too in (strong, weak)])
    together, apart, blind = ways.tolist()
    assert apart[0] == pytest.approx(together[0], rel=0.05) and blind[0] == pytest.approx(together[0], rel=0.05)
    assert apart[1] == pytest.approx(together[1], rel=0.3)
    assert blind[1] < 0.7 * together[1]


def travelled(gradients: torch.Tensor, workers: int) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1:]))
    optimizer = Muon([parameter], lr=0.01, workers=workers)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return -parameter.detach()


def test_matrix_without_any_gradient_stays_finite() -> None:
    assert orthogonal(torch.zeros(2, 4, 6)).eq(0).all()


def test_state_goes_on_where_it_was() -> None:
    whole = stepped(Muon)
    parameters = matrices(0)
    optimizer = Muon(parameters, lr=0.1, weight_decay=0.2)
    for step in range(5):
        if step == 2:
            state = optimizer.state_dict()
            optimizer = Muon(parameters, lr=0.1, weight_decay=0.2)
            optimizer.load_state_dict(state)
        for parameter, gradient in zip(parameters, matrices(1 + step), strict=True):
            parameter.grad = gradient.detach()
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(whole, parameters, strict=True))
