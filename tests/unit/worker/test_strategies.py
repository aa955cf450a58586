"""What a worker hands over: mean gradients by scored positions, in rounds and in synchronous steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.codec import codec, encoded, encoder, payload_bytes
from hypha_ray.codec.feedback import blocks, tensors
from hypha_ray.config.schema import Sync
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.scheduler.worker_state import weight
from hypha_ray.server.merge import mean
from hypha_ray.telemetry.round_records import step_record
from hypha_ray.types import Arrays, Delta, FragmentUpdate, Plan, Report, Span
from hypha_ray.worker.incarnation import epoch_order
from hypha_ray.worker.supervised import SupervisedTrainer
from hypha_ray.worker.trainer import export_inner_state, import_inner_state
from tests.support.small_models import VIT
from tests.support.worker_bench import Bench, plan_of

SYNC = {"strategy": "sync"}
GROUP = "parameters/float32"
LENGTHS = np.random.default_rng(1).choice([1, 2, 3, 4, 16], 64)
"""Of padded samples; one token alone has nothing to score."""


def mean_gradient(bench: Bench, samples: int) -> np.ndarray[Any, Any]:
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
    expected = mean_gradient(bench, 20)
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
    assert np.abs(bench.weights - mean_gradient(bench, 16)).max() < 1e-6


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


def bench_of(batch: int, plan: Plan, **tables: dict[str, object]) -> Bench:
    bench = Bench(**tables)
    bench.slice["attention_mask"] = (np.arange(16)[None, :] < LENGTHS[:, None]).astype(np.int32)
    return bench.run(plan)


def by_hand(bench: Bench, samples: range) -> tuple[np.ndarray, float, int]:
    """Gradient and loss of these samples of the epoch as one batch, in plain torch, and the number of labels."""
    rows = epoch_order(0, 0, 0, 64)[samples.start : samples.stop]
    ids = torch.from_numpy(bench.slice["input_ids"][rows].astype(np.int64))
    mask = torch.from_numpy(bench.slice["attention_mask"][rows].astype(np.int64))
    model = build_model(bench.job.model, 0)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    labels = ids.masked_fill(mask == 0, -100)[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 50), labels.reshape(-1))
    loss.backward()
    gradient = gather(model, layout_of(model), 0, gradients=True)[GROUP]
    return gradient, loss.item(), int((labels != -100).sum())


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(("batch", "accumulation"), [(32, 1), (32, 8), (8, 1), (8, 3), (1, 1)])
def test_padded_batches_have_the_gradient_of_the_joined_batch(batch: int, accumulation: int) -> None:
    bench = bench_of(batch, plan_of(32, batch=batch), sync=SYNC, rounds={"accumulation": accumulation})
    gradient, loss, scored = by_hand(bench, range(32))
    delta = bench.of(Delta)[0]
    assert error(bench.weights, gradient) < 1e-5
    assert (delta.scored, delta.loss) == (scored, pytest.approx(loss, rel=1e-6))


def test_padded_gradients_of_two_workers_merge_to_that_of_the_joined_batch() -> None:
    shares = [Plan(0, 0, (Span(0, 0, start, stop),), 8, keep=frozenset({0})) for start, stop in ((0, 8), (8, 32))]
    benches = [bench_of(8, plan, sync=SYNC) for plan in shares]
    deltas = [bench.of(Delta)[0] for bench in benches]
    weights = [weight(Sync(strategy="sync"), delta) for delta in deltas]
    merged = mean(weights)((torch.from_numpy(bench.weights) for bench in benches), torch.empty(len(benches[0].weights)))
    gradient, _, _ = by_hand(benches[0], range(32))
    assert error(merged.numpy(), gradient) < 1e-5
    assert weights != [delta.samples for delta in deltas]


def test_weight_is_samples_where_workers_step_by_themselves_and_one_where_all_weigh_alike() -> None:
    delta = bench_of(8, plan_of(16)).of(Delta)[0]
    assert delta.scored != delta.samples == weight(Sync(), delta) == weight(Sync(strategy="async"), delta)
    assert weight(Sync(weighting="uniform"), delta) == weight(Sync(strategy="sync", weighting="uniform"), delta) == 1


def test_reports_have_the_loss_over_scored_positions_and_tokens_without_padding() -> None:
    bench = bench_of(4, plan_of(32, batch=4), sync=SYNC)  # Weights stay, so the losses are those of one model.
    _, loss, scored = by_hand(bench, range(32))
    reports, delta = bench.of(Report), bench.of(Delta)[0]
    assert sum(report.loss_sum for report in reports) / scored == pytest.approx(loss, rel=1e-6)
    rows = epoch_order(0, 0, 0, 64)[:32]
    tokens = int(LENGTHS[rows].sum())
    assert sum(report.scored for report in reports) == scored
    assert sum(report.tokens for report in reports) == delta.tokens == tokens < 32 * 16
    records = [step_record(report, 0, 0) for report in reports]
    assert [record["loss"] for record in records] == [pytest.approx(one.loss_sum / one.scored) for one in reports]


def test_batch_with_nothing_to_score_is_no_step_and_no_loss() -> None:
    bench = Bench()
    bench.slice["attention_mask"] = np.zeros((64, 16), np.int32)
    bench.run(plan_of(16))
    delta, theta = bench.of(Delta)[0], bench.theta[GROUP]
    assert (delta.samples, delta.scored, delta.tokens, delta.loss) == (16, 0, 0, None)
    assert np.array_equal(bench.weights, theta)
    assert [step_record(report, 0, 0)["loss"] for report in bench.of(Report)] == [None, None]


def test_data_without_tokens_has_none() -> None:
    bench = Bench(model={"config": VIT, "type": "image-classification"})
    images: Arrays = {"images": np.zeros((64, 1, 8, 8), np.float32), "labels": np.zeros(64, np.int64)}
    bench.slice = images  # type: ignore[assignment]
    delta = bench.run(plan_of(16)).of(Delta)[0]
    assert (delta.tokens, delta.scored) == (None, 16)
    assert {report.tokens for report in bench.of(Report)} == {None}
