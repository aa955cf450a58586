"""Workers whose model has weights of 16 bits: what rounding does to global weights is nothing that was learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.codec import upward_codec
from hypha_ray.config.schema import Sync
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, initial_momentum, reduce
from hypha_ray.types import Delta, Flat, FragmentUpdate
from tests.support.worker_bench import CONFIG, Bench, plan_of

GROUP = "parameters/float32"
STILL = {"learning_rate": 1e-12, "weight_decay": 0.0}
"""A rate by which no weight of 16 bits moves."""


def bench_of(dtype: str, **tables: Any) -> Bench:
    """A worker whose global weights lie between those of 16 bits, as they do after any outer step."""
    bench = Bench(model={"config": {**CONFIG, "dtype": dtype}}, **tables)
    for theta in bench.thetas:
        noise = np.random.default_rng(0).uniform(-(2**-9), 2**-9, theta[GROUP].size)
        there = np.where(np.abs(theta[GROUP]) < 1e-4, 0.01, theta[GROUP])  # A zero would move by any step.
        theta[GROUP] = (there * (1 + noise)).astype(np.float32)
    bench.theta = bench.thetas[0]
    assert not np.array_equal(rounded(bench.theta[GROUP], dtype), bench.theta[GROUP])
    return bench


def rounded(weights: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(weights).to(getattr(torch, dtype)).float().numpy()


def step(bench: Bench, payload: Flat) -> tuple[Flat, float]:
    """The server's step of one payload: new weights, and the norm of the delta."""
    rules = ReduceSpec(bench.layout, 0, OuterOptimizer(), bench.job.sync, upward_codec(bench.job.sync))
    new, _, verdict = reduce(0, bench.theta, initial_momentum(bench.layout, 0), [Received(0, 1, 8, payload)], rules)
    return new, verdict.accepted[0].norm


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk", "visible"])
@pytest.mark.parametrize("strategy", ["diloco", "async"])
def test_nothing_learned_is_no_delta_at_all(dtype: str, codec: str, strategy: str) -> None:
    bench = bench_of(dtype, inner_optimizer=STILL, sync={"codec": codec, "strategy": strategy}).run(plan_of(16))
    new, norm = step(bench, bench.of(dict)[0])
    assert norm == 0.0
    assert np.array_equal(new[GROUP], bench.theta[GROUP])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_delta_is_what_the_weights_of_the_model_have_moved_by(dtype: str) -> None:
    bench = bench_of(dtype).run(plan_of(16))
    moved = bench.weights - bench.theta[GROUP]
    plain = Bench(model={"config": {**CONFIG, "dtype": dtype}})
    plain.thetas = [{**theta, GROUP: rounded(theta[GROUP], dtype)} for theta in bench.thetas]
    plain.theta = plain.thetas[0]
    plain.run(plan_of(16))
    expected = plain.weights - plain.theta[GROUP]
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(moved, expected, atol=1e-6)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_nothing_learned_is_no_delta_after_results_were_mixed_in(mixing: float) -> None:
    bench = bench_of("bfloat16", inner_optimizer=STILL, sync={"mixing": mixing})
    bench.parts = 2

    def answer(event: Any) -> None:
        if isinstance(event, Delta) and event.round == 0:
            bench.inbox.assign(plan_of(16, number=1))
            bench.inbox.merge(FragmentUpdate(1, 0, whole=False), bench.theta)

    bench.on_event = answer
    bench.run(plan_of(16))
    first, second = bench.of(dict)
    assert np.array_equal(first[GROUP], bench.theta[GROUP])
    np.testing.assert_allclose(second[GROUP], bench.theta[GROUP], rtol=1e-6)


def test_weights_of_32_bits_are_handed_over_as_they_are() -> None:
    bench = Bench(sync=Sync().model_dump(include={"codec"})).run(plan_of(16))
    assert not np.array_equal(bench.weights, bench.theta[GROUP])
    assert np.array_equal(Bench().run(plan_of(16)).weights, bench.weights)
