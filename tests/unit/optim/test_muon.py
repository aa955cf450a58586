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
