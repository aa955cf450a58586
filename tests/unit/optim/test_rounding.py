"""Extras of torch: AdamW for one of several workers, and weights of bfloat16 that are rounded at random."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hypha_ray.config.training import InnerOptimizer
from hypha_ray.optim.optimizers import build_optimizer
from hypha_ray.optim.torch_extras import FleetAdamW, rounded
from hypha_ray.types import FragmentUpdate
from tests.support.worker_bench import CONFIG, Bench, plan_of
from tests.unit.optim.test_optimizers import network


def neighbours(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The nearest values of bfloat16 towards zero and away from it."""
    below = values.numpy().view(np.uint32) & 0xFFFF0000
    return below.view(np.float32), (below + 0x10000).view(np.float32)


@pytest.mark.slow
def test_mean_of_rounded_values_is_the_value() -> None:
    torch.manual_seed(0)
    draws, values = 20_000, torch.cat([torch.randn(60) * 10.0**power for power in (-39, -6, 0, 12)])
    found = torch.stack([rounded(values) for _ in range(draws)]).double().numpy()
    low, high = (one.astype(np.float64) for one in neighbours(values))
    assert bool(((found == low) | (found == high)).all())
    part = (values.double().numpy() - low) / (high - low)
    deviation = np.abs(high - low) * np.sqrt(part * (1 - part) / draws)
    off = (found.mean(axis=0) - values.double().numpy()) / np.maximum(deviation, 1e-300)
    assert np.abs(off).max() < 4.5 and 0.8 < np.sqrt((off**2).mean()) < 1.2


def test_values_of_bfloat16_infinities_and_nan_stay_as_they_are() -> None:
    held = torch.tensor([0.0, -0.0, 1.0, -2.5, 3.0e38, 1e-40, torch.inf, -torch.inf]).to(torch.bfloat16)
    for _ in range(50):
        assert torch.equal(rounded(held.float()).view(torch.int16), held.view(torch.int16))
        assert bool(rounded(torch.tensor([torch.nan])).isnan())


@pytest.mark.parametrize(
    "name", ["adamw", "adamw k_aware", "muon", "sgd", "adafactor", "nadam", "rmsprop", "adamw8bit"]
)
def test_step_ends_beside_that_of_float32(name: str) -> None:
    if name == "adamw8bit" and find_spec("bitsandbytes") is None:
        pytest.skip("it is an extra")
    name, _, k_aware = name.partition(" ")
    table = {"name": name, "learning_rate": 1e-3, "momentum": 0.9, "k_aware": bool(k_aware), "clip_norm": None}
    ours, theirs = network().bfloat16(), network().bfloat16().float()
    inner = build_optimizer(ours, InnerOptimizer(**table, stochastic_rounding=True), workers=4)
    plain = build_optimizer(theirs, InnerOptimizer(**table), workers=4)
    generator = torch.Generator().manual_seed(0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        one.grad = torch.randn(one.shape, generator=generator).bfloat16()
        other.grad = one.grad.float()
    held = [one.data_ptr() for one in ours.parameters()]
    gradients = [one.grad for one in ours.parameters()]
    inner.step()
    plain.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        low, high = neighbours(other.detach())
        found = one.detach().float().numpy()
        assert one.dtype == torch.bfloat16 and bool(((found == low) | (found == high)).all())
    assert [one.data_ptr() for one in ours.parameters()] == held
    assert all(one.grad is gradient for one, gradient in zip(ours.parameters(), gradients, strict=True))
    for optimizer in inner.optimizers:
        for parameter, state in optimizer.state.items():
            same = [one for one in state.values() if isinstance(one, torch.Tensor) and one.shape == parameter.shape]
            assert name == "adamw8bit" or {one.dtype for one in same if one.ndim} <= {torch.bfloat16}


def test_averages_of_bfloat16_fall_as_those_of_float32_in_the_mean() -> None:
    """The nearest value of bfloat16 to 0.999 times another one is the other one, so rounded to it none ever falls."""
    torch.manual_seed(0)
    weights = torch.nn.Linear(200, 100, bias=False).bfloat16()
    inner = build_optimizer(weights, InnerOptimizer(betas=(0.9, 0.999), clip_norm=None, stochastic_rounding=True))
    for step in range(301):
        weights.weight.grad = torch.full_like(weights.weight, float(step == 0))
        inner.step()
    (state,) = inner.optimizers[0].state.values()
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    assert float(state["exp_avg_sq"].float().mean()) == pytest.approx(0.001 * 0.999**300, rel=0.005)


def language_model_loss(dtype: torch.dtype, stochastic_rounding: bool) -> float:
    """Loss of a small model after some hundred small steps on texts of a Markov chain."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "initializer_range": 0.1}
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(dtype)
    table = InnerOptimizer(learning_rate=2e-4, weight_decay=0.0, stochastic_rounding=stochastic_rounding)
    inner = build_optimizer(model, table)
    generator = torch.Generator().manual_seed(1)
    chain = torch.softmax(3 * torch.randn(32, 32, generator=generator), dim=1)

    def texts() -> torch.Tensor:
        ids = [torch.randint(32, (16,), generator=generator)]
        for _ in range(15):
            ids.append(torch.multinomial(chain[ids[-1]], 1, generator=generator)[:, 0])
        return torch.stack(ids, dim=1)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids).logits.float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    for _ in range(120):
        inner.zero_grad()
        loss(texts()).backward()
        inner.step()
    with torch.no_grad():
        return float(np.mean([float(loss(texts())) for _ in range(8)]))


@pytest.mark.slow
def test_language_model_in_bfloat16_learns_as_in_float32_where_plain_rounding_loses() -> None:
    whole = language_model_loss(torch.float32, False)
    ours, plain = (language_model_loss(torch.bfloat16, rounds) for rounds in (True, False))
    assert ours == pytest.approx(whole, rel=0.02)
    assert plain > 1.05 * whole


REPLAY = {
    "run": {"mode": "replay"},
    "model": {"config": {**CONFIG, "dtype": "bfloat16"}},
    "inner_optimizer": {"stochastic_rounding": True, "learning_rate": 1e-3},
}


def test_replay_goes_on_to_the_bit_from_averages_that_were_rounded_at_random() -> None:
    def straight(**tables: Any) -> Bench:
        bench = Bench(**{**REPLAY, **tables})
        bench.parts = 4

        def answer(event: Any) -> None:
            if isinstance(event, dict) and len(bench.of(dict)) == 2:
                bench.inbox.assign(plan_of(16, number=1))
                bench.inbox.merge(FragmentUpdate(1, 0), bench.of(dict)[0])

        bench.on_event = answer
        return bench.run(plan_of(24))

    one, again = (straight().of(dict) for _ in range(2))
    assert [[array.tobytes() for array in part.values()] for part in one] == [
        [array.tobytes() for array in part.values()] for part in again
    ]
    successor = Bench(**REPLAY)
    successor.parts = 2
    successor.batch_source.put(0, successor.slice)
    successor.inbox.restore(one[1])
    successor.inbox.merge(FragmentUpdate(1, 0), one[0])
    successor.inbox.assign(replace(plan_of(16, version=1, number=1), restores=True))
    successor.work()
    for expected, found in zip(one[2:], successor.of(dict), strict=True):
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }


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
