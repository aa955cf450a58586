"""Losses and gradients count by scored positions: padding, however it is shared out, changes none of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hypha_ray.config.schema import Sync
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.scheduler.worker_state import weight
from hypha_ray.server.merge import mean
from hypha_ray.telemetry.round_records import step_record
from hypha_ray.types import Arrays, Delta, Plan, Report, Span
from hypha_ray.worker.incarnation import epoch_order
from tests.support.worker_bench import Bench, plan_of

GROUP = "parameters/float32"
SYNC = {"strategy": "sync"}
LENGTHS = np.random.default_rng(1).choice([1, 2, 3, 4, 16], 64)
"""Of padded samples; one token alone has nothing to score."""


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
    config = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bench = Bench(model={"config": config, "type": "image-classification"})
    images: Arrays = {"images": np.zeros((64, 1, 8, 8), np.float32), "labels": np.zeros(64, np.int64)}
    bench.slice = images  # type: ignore[assignment]
    delta = bench.run(plan_of(16)).of(Delta)[0]
    assert (delta.tokens, delta.scored) == (None, 16)
    assert {report.tokens for report in bench.of(Report)} == {None}
