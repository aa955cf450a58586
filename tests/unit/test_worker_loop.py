"""The inner loop without Ray: orders are put on the desk, events are read from a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.types import Delta, Evaluated, Flat, Merged, Plan, Ready, Report, Source, Span
from hypha_ray.worker.desk import Desk
from hypha_ray.worker.feeder import Closed, Feeder
from hypha_ray.worker.loop import InnerLoop

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 50,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SOURCE = Source("test", 0, 0)


class Bench:
    """One worker, its orders and what it says."""

    def __init__(self, **tables: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        tables = {"inner_optimizer": {"learning_rate": 1e-2}, "worker": {"report_every_s": 1e-12}, **tables}
        self.job = Job.model_validate({"model": {"config": CONFIG}, "resources": {"num_workers": 1}, **tables})
        self.feeder, self.desk = Feeder(0), Desk(1)
        self.said: list[Any] = []
        self.on_event: Callable[[Any], None] = lambda event: None
        model = build_model(self.job.model, 0)
        self.layout = layout_of(model)
        self.theta: Flat = gather(model, self.layout, 0)
        ids = np.random.default_rng(0).integers(0, 50, (64, 16)).astype(np.int32)
        self.feeder.put(0, {"input_ids": ids, "attention_mask": np.ones_like(ids)})

    def run(self, *plans: Plan) -> Bench:
        for plan in plans:
            self.desk.assign(plan)
        self.desk.merge(plans[0].round, 0, self.theta)
        loop = InnerLoop(self.job, SOURCE, self.feeder, self.desk, self._hear)
        with pytest.raises(Closed):
            loop.run()
        return self

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.said if isinstance(event, kind)]

    @property
    def weights(self) -> np.ndarray:
        flat: Flat = next(item for item in self.said if isinstance(item, dict))
        return flat["parameters/float32"].copy()

    def _hear(self, event: Any) -> None:
        self.said.append(event)
        self.on_event(event)
        if isinstance(event, dict):
            self.desk.close()


def plan_of(samples: int, batch: int = 8, version: int = 0, evaluate: int = 0) -> Plan:
    share = (Span(0, 0, 0, evaluate),) if evaluate else ()
    return Plan(0, version, (Span(0, 0, 0, samples),), batch, share, frozenset({0}))


def test_round_says_what_it_did() -> None:
    bench = Bench().run(plan_of(20, evaluate=10))
    assert [type(event).__name__ for event in bench.said[:3]] == ["Ready", "Merged", "Evaluated"]
    assert bench.of(Ready)[0].layout == bench.layout.sha256() and bench.of(Merged)[0].round == 0
    assert bench.of(Evaluated)[0].count == 10 * 15
    delta = bench.of(Delta)[0]
    assert (delta.samples, delta.batches, delta.tokens, delta.fragments) == (20, 3, 320, 1)
    assert delta.spans == (Span(0, 0, 0, 20),)
    assert sum(report.samples for report in bench.of(Report)) == 20
    assert delta.payload_bytes == bench.weights.nbytes
    assert delta.loss == pytest.approx(np.log(50), rel=0.05)


def test_accumulation_changes_the_result_by_rounding_only() -> None:
    whole = Bench().run(plan_of(32)).weights
    parts = Bench(rounds={"accumulation": 4}).run(plan_of(32)).weights
    start = Bench().theta["parameters/float32"]
    assert np.abs(whole - parts).max() < 1e-3 * np.abs(whole - start).max()


def test_padding_counts_for_nothing_in_accumulation() -> None:
    def padded(accumulation: int) -> np.ndarray:
        bench = Bench(rounds={"accumulation": accumulation})
        ids = np.random.default_rng(1).integers(0, 50, (64, 16)).astype(np.int32)
        mask = np.ones_like(ids)
        mask[::3, 5:] = 0
        mask[::4] = 0
        bench.feeder.put(1, {"input_ids": ids, "attention_mask": mask})
        return bench.run(Plan(0, 0, (Span(0, 1, 0, 32),), 8, keep=frozenset({0, 1}))).weights

    whole, parts = padded(1), padded(8)
    assert np.isfinite(whole).all()
    assert np.abs(whole - parts).max() < 1e-3 * np.abs(whole - Bench().theta["parameters/float32"]).max()


def test_autocast_trains_close_to_full_precision() -> None:
    full = Bench().run(plan_of(32)).of(Delta)[0]
    mixed = Bench(worker={"autocast": "bf16"}).run(plan_of(32)).of(Delta)[0]
    assert mixed.loss == pytest.approx(full.loss, rel=0.02) and mixed.loss != full.loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_model_trains_like_the_plain_one() -> None:
    plain = Bench().run(plan_of(16)).weights
    compiled = Bench(worker={"compile": True}).run(plan_of(16)).weights
    assert np.abs(plain - compiled).max() < 1e-4


def test_same_round_twice_gives_the_same_bits_with_dropout() -> None:
    def once() -> np.ndarray:
        config = {**CONFIG, "resid_pdrop": 0.5}
        return Bench(model={"config": config}).run(plan_of(16)).weights

    assert np.array_equal(once(), once())


def test_shortened_plan_ends_the_round_at_the_next_batch() -> None:
    bench = Bench()

    def shorten(event: Any) -> None:
        if isinstance(event, Report) and len(bench.of(Report)) == 2:
            bench.desk.assign(plan_of(8, version=1))

    bench.on_event = shorten
    delta = bench.run(plan_of(64)).of(Delta)[0]
    assert delta.samples == 16 and delta.spans == (Span(0, 0, 0, 16),)


def test_lengthened_plan_is_trained_to_its_new_end() -> None:
    bench = Bench()

    def lengthen(event: Any) -> None:
        if isinstance(event, Report) and len(bench.of(Report)) == 1:
            bench.desk.assign(plan_of(40, version=1))

    bench.on_event = lengthen
    assert bench.run(plan_of(16)).of(Delta)[0].samples == 40


def test_round_that_the_fleet_has_left_is_dropped() -> None:
    bench = Bench()

    def move_on(event: Any) -> None:
        if isinstance(event, Report) and event.round == 0:
            bench.desk.assign(Plan(1, 0, (Span(0, 0, 32, 40),), 8, keep=frozenset({0})))
            bench.desk.merge(1, 0, bench.theta)

    bench.on_event = move_on
    deltas = bench.run(plan_of(32)).of(Delta)
    assert [delta.round for delta in deltas] == [1] and deltas[0].samples == 8


def test_schedule_follows_the_round_and_not_the_number_of_steps() -> None:
    def rates(samples: int) -> list[float]:
        bench = Bench(
            rounds={"update_rounds": 2, "samples_between_updates": 32, "max_batch_size": 8},
            inner_optimizer={"learning_rate": 1.0, "schedule": "linear", "clip_norm": 1e-9},
        )
        reports = bench.run(plan_of(samples)).of(Report)
        return [report.learning_rate for report in reports]

    assert rates(32) == pytest.approx([7 / 8, 6 / 8, 5 / 8, 4 / 8])
    assert rates(64)[1::2] == pytest.approx([6.5 / 8, 5.5 / 8, 4.5 / 8, 3.5 / 8])


def test_slowdown_stretches_the_batch_time() -> None:
    def batch_s(factor: float) -> float:
        reports = Bench(testing={"slowdown": [factor]}).run(plan_of(64, batch=4)).of(Report)[2:]
        return sum(report.seconds for report in reports) / sum(report.timed_batches for report in reports)

    assert batch_s(8.0) > 3 * batch_s(1.0)
