"""Samples without a finite gradient are left out and named; damaged deltas are damaged as they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.errors import ConfigError
from hypha_ray.failpoints import arm, hits
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.types import Damaged, Delta, Flat, FragmentUpdate, Plan, Span
from hypha_ray.worker.incarnation import epoch_order
from tests.support.small_models import VIT
from tests.support.worker_bench import Bench, plan_of

PARAMETERS, BUFFERS = "parameters/float32", "buffers/float32"
RESNET = {"model_type": "resnet", "num_channels": 1, "embedding_size": 4, "hidden_sizes": [4], "depths": [1]}
SGD = {"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "clip_norm": None}
BAD = 13
"""Place of the damaged sample in the epoch: in the second batch of eight."""
GROUP = "parameters/float32"


def images(value: float, places: tuple[int, ...] = (BAD,)) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(0)
    arrays = {
        "images": draws.standard_normal((64, 1, 8, 8)).astype(np.float32),
        "labels": draws.integers(0, 2, 64),
    }
    for place in places:
        arrays["images"][epoch_order(0, 0, 0, 64)[place], 0, 0, 0] = value
    return arrays


def bench_of(config: dict[str, Any], value: float, places: tuple[int, ...] = (BAD,), **tables: Any) -> Bench:
    bench = Bench(**{"inner_optimizer": SGD, "model": {"config": config, "type": "image-classification"}} | tables)
    bench.slice = images(value, places)
    return bench


def by_hand(bench: Bench, batches: list[list[int]]) -> dict[str, np.ndarray]:
    """Weights and statistics after plain steps on these batches of places in the epoch."""
    model = build_model(bench.job.model, 0)
    optimizer, rows = torch.optim.SGD(model.parameters(), 0.1), epoch_order(0, 0, 0, 64)
    for places in batches:
        chosen = rows[places]
        pixels, labels = (torch.from_numpy(bench.slice[name][chosen]) for name in ("images", "labels"))
        optimizer.zero_grad()
        model(pixel_values=pixels, labels=labels).loss.backward()
        optimizer.step()
    return gather(model, layout_of(model), 0)


def places(start: int, *without: int) -> list[int]:
    return [place for place in range(start, start + 8) if place not in without]


@pytest.mark.parametrize(
    ("config", "value"), [(VIT, np.nan), (VIT, np.inf), (VIT, 3e38), (RESNET, np.nan), (RESNET, np.inf)]
)
def test_batch_with_a_damaged_sample_is_skipped_and_the_sample_named(config: dict[str, Any], value: float) -> None:
    bench = bench_of(config, value).run(plan_of(24))
    (event,), delta = bench.of(Damaged), bench.of(Delta)[0]
    assert (event.samples, event.whole) == (((0, epoch_order(0, 0, 0, 64)[BAD]),), True)
    assert (delta.samples, delta.scored, delta.batches) == (24, 16, 3)
    wanted, found = by_hand(bench, [places(0), places(16)]), bench.of(dict)[0]
    assert all(np.abs(found[group] - wanted[group]).max() < 1e-6 for group in wanted)


def test_batch_whose_statistics_overflow_is_skipped_though_its_loss_is_finite() -> None:
    bench = bench_of(RESNET, 3e38).run(plan_of(24))
    (event,), wanted, found = bench.of(Damaged), by_hand(bench, [places(0), places(16)]), bench.of(dict)[0]
    assert (0, epoch_order(0, 0, 0, 64)[BAD]) in event.samples and event.whole
    assert all(np.abs(found[group] - wanted[group]).max() < 1e-6 for group in wanted)


@pytest.mark.parametrize("config", [VIT, RESNET], ids=["vit", "resnet"])
def test_quarantine_leaves_the_sample_out_and_trains_on_the_others(config: dict[str, Any]) -> None:
    bench = bench_of(config, np.nan, dataset={"allow_quarantine": True}).run(plan_of(24))
    (event,), delta = bench.of(Damaged), bench.of(Delta)[0]
    assert (event.samples, event.whole) == (((0, epoch_order(0, 0, 0, 64)[BAD]),), False)
    assert (delta.samples, delta.scored) == (24, 23)
    wanted, found = by_hand(bench, [places(0), places(8, BAD), places(16)]), bench.of(dict)[0]
    assert all(np.abs(found[group] - wanted[group]).max() < 1e-6 for group in wanted)


def test_mean_gradient_has_no_part_of_a_damaged_batch() -> None:
    bench = bench_of(VIT, np.nan, sync={"strategy": "sync"}).run(plan_of(24))
    model, rows = build_model(bench.job.model, 0), epoch_order(0, 0, 0, 64)[places(0) + places(16)]
    pixels, labels = (torch.from_numpy(bench.slice[name][rows]) for name in ("images", "labels"))
    model(pixel_values=pixels, labels=labels).loss.backward()
    assert np.abs(bench.weights - gather(model, layout_of(model), 0, gradients=True)[PARAMETERS]).max() < 1e-6


@pytest.mark.parametrize("quarantine", [False, True])
def test_many_damaged_batches_in_a_row_end_the_run_and_say_so(quarantine: bool) -> None:
    tables = {"dataset": {"allow_quarantine": quarantine}}
    some = bench_of(VIT, np.nan, tuple(range(0, 18)), **tables).run(plan_of(40, batch=2))
    assert len(some.of(Damaged)) == 9 and some.of(Delta)[0].scored == 22
    with pytest.raises(ConfigError, match=r"TRN002.*10 batches in a row.*sample \d+ of slice 0"):
        bench_of(VIT, np.nan, tuple(range(0, 20)), **tables).run(plan_of(40, batch=2))


def test_diverging_training_ends_with_that_error() -> None:
    bench = bench_of(VIT, 0.0, inner_optimizer={**SGD, "learning_rate": 1e30})
    with pytest.raises(ConfigError, match=r"TRN002.*training diverged"):
        bench.run(plan_of(60, batch=4))


@pytest.mark.parametrize("rejections", [0, 1])
def test_inner_state_begins_anew_after_a_rejected_delta(rejections: int) -> None:
    def second_round(told: int) -> np.ndarray:
        bench = Bench()
        bench.parts = 2

        def next_round(event: Any) -> None:
            if isinstance(event, Delta) and event.round == 0:
                spans = (Span(0, 0, 16, 32),)
                bench.inbox.assign(Plan(1, 0, spans, 8, keep=frozenset({0}), rejections=told))
                bench.inbox.merge(FragmentUpdate(1, 0), bench.theta)

        bench.on_event = next_round
        flat: dict[str, np.ndarray] = bench.run(plan_of(16)).of(dict)[1]
        return flat[PARAMETERS]

    fresh = Bench().run(Plan(1, 0, (Span(0, 0, 16, 32),), 8, keep=frozenset({0}))).weights
    assert np.array_equal(second_round(rejections), fresh) == (rejections == 1)


@pytest.fixture
def sent(tmp_path: Path) -> Any:
    """What a worker sends whose first payload is tampered with."""

    def send(action: str, parts: int = 1) -> Bench:
        log = tmp_path / f"{action}.jsonl"
        log.unlink(missing_ok=True)
        specs = [f"worker.payload:0={action}@1"]
        arm(specs, str(log))
        bench = Bench(testing={"failpoints": specs, "failpoint_log": str(log)})
        bench.parts = parts
        bench.run(plan_of(16))
        assert hits(log, "worker.payload") == 1
        return bench

    yield send
    arm([], None)


@pytest.fixture(scope="module")
def honest() -> Bench:
    return Bench().run(plan_of(16))


def test_factors_scale_the_difference_to_the_rounds_weights(sent: Any, honest: Bench) -> None:
    theta, weights = honest.theta[GROUP], honest.weights
    assert np.array_equal(sent("zero").weights, theta)
    np.testing.assert_allclose(sent("flip").weights, 2 * theta - weights, atol=1e-6)
    np.testing.assert_allclose(sent("huge").weights, theta + 1e6 * (weights - theta), rtol=1e-5)
    assert sent("flip").weights.dtype == np.float32


@pytest.mark.parametrize("action", ["nan", "inf"])
def test_one_value_is_not_finite(action: str, sent: Any, honest: Bench) -> None:
    weights = sent(action).weights
    assert str(weights[0]) == action and np.array_equal(weights[1:], honest.weights[1:])


def test_forms_are_wrong_as_named(sent: Any, honest: Bench) -> None:
    assert sent("shape").weights.shape == (honest.weights.size - 1,)
    assert sent("dtype").weights.dtype == np.float16
    damaged: Flat = sent("names").of(dict)[0]
    assert GROUP not in damaged and len(damaged) == len(honest.of(dict)[0])


def test_repeat_sends_everything_twice(sent: Any, honest: Bench) -> None:
    bench = sent("repeat", parts=2)
    first, second = bench.of(Delta)
    assert first == second and all(np.array_equal(part[GROUP], honest.weights) for part in bench.of(dict))


def test_stale_sends_it_as_of_the_round_before_and_then_rightly(sent: Any) -> None:
    bench = sent("stale", parts=2)
    assert [delta.round for delta in bench.of(Delta)] == [-1, 0]
    assert bench.names[-5:-1] == ["Delta", "dict", "Delta", "dict"]


def test_action_that_nobody_knows_is_an_error(sent: Any) -> None:
    with pytest.raises(ValueError, match="typo"):
        sent("typo")
