"""What a worker hands over in synchronous training: the mean gradient of its samples, and a model that stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.codec import codec, encoded, encoder, payload_bytes
from hypha_ray.codec.feedback import blocks, tensors
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.types import Delta, FragmentUpdate, Report
from hypha_ray.worker.incarnation import epoch_order
from hypha_ray.worker.supervised import SupervisedTrainer
from hypha_ray.worker.trainer import export_inner_state, import_inner_state
from tests.support.worker_bench import Bench, plan_of

SYNC = {"strategy": "sync"}
GROUP = "parameters/float32"


def by_hand(bench: Bench, samples: int) -> np.ndarray[Any, Any]:
    """The gradient of the mean loss over the first samples of the round."""
    model = build_model(bench.job.model, 0)
    ids = torch.from_numpy(bench.slice["input_ids"][epoch_order(0, 0, 0, 64)[:samples]].astype(np.int64))
    model(input_ids=ids, labels=ids).loss.backward()
    return gather(model, layout_of(model), 0, gradients=True)[GROUP]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_result_is_the_gradient_of_the_joined_batches(accumulation: int) -> None:
    bench = Bench(sync=SYNC, rounds={"accumulation": accumulation}).run(plan_of(20))
    delta = bench.of(Delta)[0]
    assert (delta.samples, delta.batches, delta.inner_state) == (20, 3, False)
    expected = by_hand(bench, 20)
    assert np.abs(bench.weights - expected).max() < 1e-6 < np.abs(expected).max()
    norms = [report.gradient_norm for report in bench.of(Report)]
    assert norms[-1] == pytest.approx(float(np.linalg.norm(expected)), rel=1e-4)


def test_gradients_of_a_round_are_forgotten_in_the_next_and_the_model_stays() -> None:
    bench = Bench(sync=SYNC)
    bench.parts = 2

    def next_round(event: Any) -> None:
        if isinstance(event, Delta) and event.round == 0:
            bench.inbox.assign(plan_of(16, number=1))
            bench.inbox.merge(FragmentUpdate(1, 0), bench.theta)

    bench.on_event = next_round
    bench.run(plan_of(16))
    assert bench.of(Delta)[0].loss == bench.of(Delta)[1].loss
    assert np.abs(bench.weights - by_hand(bench, 16)).max() < 1e-6


def test_replay_has_no_state_to_hand_on_and_dropout_repeats() -> None:
    def once() -> Bench:
        config = {**Bench().job.model.config, "resid_pdrop": 0.5}  # type: ignore[dict-item]
        return Bench(sync=SYNC, run={"mode": "replay"}, model={"config": config}).run(plan_of(16))

    one, other = once(), once()
    assert not one.of(Delta)[0].inner_state
    assert np.array_equal(one.weights, other.weights)


@pytest.mark.parametrize("tables", [{}, {"sync": SYNC}])
def test_coded_result_is_what_the_plain_one_says(tables: dict[str, Any]) -> None:
    def run(name: str) -> Bench:
        return Bench(sync={**tables.get("sync", {}), "codec": name}).run(plan_of(20))

    plain, coded = run("fp32"), run("int8")
    wanted = plain.weights if tables else plain.weights - plain.theta[GROUP]
    payload = coded.of(dict)[0]
    parts = blocks(wanted.size)
    found = np.concatenate([codec("int8").decode(tensors(payload), GROUP, part).numpy() for part in parts])
    delta = coded.of(Delta)[0]
    assert np.linalg.norm(found - wanted) == pytest.approx(delta.quality[0] * np.linalg.norm(wanted), rel=0.01)
    assert 0 < delta.quality[0] < 0.02 and delta.quality[1] > 0.999
    assert delta.payload_bytes == payload_bytes(payload) < plain.of(Delta)[0].payload_bytes * 0.27


def test_successor_makes_up_for_what_its_predecessor_left_out() -> None:
    bench = Bench()
    trainer, successor = SupervisedTrainer(bench.job), SupervisedTrainer(bench.job)
    bench.batch_source.put(0, bench.slice)
    trainer.step(bench.batch_source.batch(plan_of(8).spans, 0, 8))
    first, second = [encoder("e3m0", 1.0), encoder("topk", 0.5)], [encoder("e3m0", 1.0), encoder("topk", 0.5)]
    flats = [{GROUP: np.random.default_rng(seed).standard_normal(6000).astype(np.float32)} for seed in (1, 2)]
    encoded(first, flats, ())
    state = export_inner_state(trainer, first)
    assert any(name.endswith("exp_avg") for name in state) and sum(name.startswith("left-out/") for name in state) == 2
    import_inner_state(successor, second, state)
    (one, _), (other, _) = (encoded(encoders, flats, ()) for encoders in (first, second))
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)
