"""The inner loop of one worker: batches cut from spans, what it says, its errors, and that it trains as it should."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError
from hypha_ray.store.snapshots import digest, named
from hypha_ray.types import Delta, Evaluated, Failed, FragmentUpdate, Merged, Plan, Ready, Report, Source, Span, window
from hypha_ray.worker.incarnation import BatchSource, Incarnation, epoch_order
from tests.support.worker_bench import CONFIG, Bench, plan_of


def slice_of(index: int, samples: int) -> dict[str, np.ndarray]:
    arrays = {"input_ids": np.arange(samples * 2, dtype=np.int32).reshape(samples, 2) + 1000 * index}
    arrays["input_ids"].flags.writeable = False
    return arrays


def test_batches_of_spans_cover_each_sample_once_in_the_epochs_order() -> None:
    batch_source = BatchSource(seed=7)
    for index, samples in ((0, 10), (1, 6)):
        batch_source.put(index, slice_of(index, samples))
    spans = (Span(2, 0, 4, 10), Span(2, 1, 0, 6))
    rows = np.concatenate([batch_source.batch(spans, start, 4).arrays["input_ids"] for start in range(0, 12, 4)])
    expected = [slice_of(0, 10)["input_ids"][i] for i in epoch_order(7, 2, 0, 10)[4:]]
    expected += [slice_of(1, 6)["input_ids"][i] for i in epoch_order(7, 2, 1, 6)]
    assert np.array_equal(rows, np.array(expected))


def test_upcoming_batches_are_those_that_come_as_far_as_their_slices_are_there() -> None:
    batch_source = BatchSource(seed=7)
    spans = (Span(0, 0, 0, 10), Span(0, 1, 0, 6), Span(0, 2, 0, 3))
    for index, samples in ((0, 10), (1, 6)):
        batch_source.put(index, slice_of(index, samples))
    there = [one.keys for one in batch_source.upcoming(spans, 4, 4, waits=False)]
    batch_source.put(2, slice_of(2, 3))
    all_ = [one.keys for one in batch_source.upcoming(spans, 4, 4, waits=True)]

    assert [len(keys) for keys in all_] == [4, 4, 4, 3]
    assert np.array_equal(np.concatenate(all_), batch_source.batch(spans, 4, 15).keys)
    assert len(there) == 3 and all(map(np.array_equal, there, all_))


def test_batch_is_a_writable_copy() -> None:
    batch_source = BatchSource(seed=0)
    batch_source.put(0, slice_of(0, 8))
    for shuffled in (True, False):
        batch = batch_source.batch((Span(0, 0, 0, 8),), 0, 4, shuffled).arrays["input_ids"]
        assert batch.flags.writeable and batch.flags.owndata


def test_order_differs_between_epochs_and_slices_but_not_between_calls() -> None:
    assert not np.array_equal(epoch_order(0, 0, 0, 50), epoch_order(0, 1, 0, 50))
    assert not np.array_equal(epoch_order(0, 0, 0, 50), epoch_order(0, 0, 1, 50))
    assert np.array_equal(epoch_order(3, 2, 1, 50), epoch_order(3, 2, 1, 50))


def test_waiting_for_a_slice_ends_when_it_comes() -> None:
    batch_source = BatchSource(seed=0)
    found: list[int] = []
    reader = Thread(target=lambda: found.append(len(batch_source.batch((Span(0, 5, 0, 4),), 0, 4))))
    reader.start()
    batch_source.put(5, slice_of(5, 4))
    reader.join(timeout=10)
    assert found == [4]


def test_window_of_spans_is_exact() -> None:
    spans = (Span(0, 3, 2, 5), Span(0, 1, 0, 4), Span(1, 3, 0, 2))
    for start in range(10):
        for stop in range(start, 10):
            flat = [(s.epoch, s.slice, n) for s in spans for n in range(s.start, s.stop)]
            got = [(s.epoch, s.slice, n) for s in window(spans, start, stop) for n in range(s.start, s.stop)]
            assert got == flat[start:stop]


def test_slice_that_stays_for_many_epochs_takes_no_more_memory() -> None:
    batch_source = BatchSource(seed=7)
    batch_source.put(0, slice_of(0, 10))
    batch_source.put(1, slice_of(1, 6))
    sizes = []
    for epoch in range(40):
        for index, samples in ((0, 10), (1, 6)):
            rows = batch_source.batch((Span(epoch, index, 0, samples),), 0, samples).arrays["input_ids"]
            assert np.array_equal(rows, slice_of(index, samples)["input_ids"][epoch_order(7, epoch, index, samples)])
        sizes.append(len(gc.get_referents(batch_source._orders)))
    assert max(sizes[2:]) == sizes[2]


def test_round_says_what_it_did() -> None:
    bench = Bench().run(plan_of(20, evaluate=10))
    assert [type(event).__name__ for event in bench.said[:3]] == ["Ready", "Merged", "Evaluated"]
    assert bench.of(Ready)[0].layout == bench.layout.sha256() and bench.of(Merged)[0].version == 0
    assert bench.of(Evaluated)[0].sums["val_loss"][1] == 10 * 15
    delta = bench.of(Delta)[0]
    assert (delta.samples, delta.batches, delta.tokens, delta.fragments) == (20, 3, 320, 1)
    assert delta.spans == (Span(0, 0, 0, 20),)
    assert sum(report.samples for report in bench.of(Report)) == 20
    assert delta.payload_bytes == bench.weights.nbytes
    assert delta.loss == pytest.approx(np.log(50), rel=0.05)


def test_first_merge_proves_the_weights_by_their_hash_and_later_ones_say_nothing() -> None:
    bench = Bench()
    bench.parts = 2

    def next_round(event: Any) -> None:
        if isinstance(event, Delta) and event.round == 0:
            bench.inbox.assign(plan_of(8, number=1))
            bench.inbox.merge(FragmentUpdate(1, 0), bench.theta)

    bench.on_event = next_round
    hashes = [event.theta_sha256 for event in bench.run(plan_of(8)).of(Merged)]
    assert hashes == [digest(named(bench.layout, [bench.theta])), None]


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
        bench.batch_source.put(1, {"input_ids": ids, "attention_mask": mask})
        return bench.run(Plan(0, 0, (Span(0, 1, 0, 32),), 8, keep=frozenset({0, 1}))).weights

    whole, parts = padded(1), padded(8)
    assert np.isfinite(whole).all()
    assert np.abs(whole - parts).max() < 1e-3 * np.abs(whole - Bench().theta["parameters/float32"]).max()


def test_autocast_trains_close_to_full_precision() -> None:
    full = Bench().run(plan_of(32)).of(Delta)[0]
    mixed = Bench(worker={"autocast": "bf16"}).run(plan_of(32)).of(Delta)[0]
    assert mixed.loss == pytest.approx(full.loss, rel=0.02) and mixed.loss != full.loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.long
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
            bench.inbox.assign(plan_of(8, version=1))

    bench.on_event = shorten
    delta = bench.run(plan_of(64)).of(Delta)[0]
    assert delta.samples == 16 and delta.spans == (Span(0, 0, 0, 16),)


def test_lengthened_plan_is_trained_to_its_new_end() -> None:
    bench = Bench()

    def lengthen(event: Any) -> None:
        if isinstance(event, Report) and len(bench.of(Report)) == 1:
            bench.inbox.assign(plan_of(40, version=1))

    bench.on_event = lengthen
    assert bench.run(plan_of(16)).of(Delta)[0].samples == 40


def test_round_that_the_fleet_has_left_is_dropped() -> None:
    bench = Bench()

    def move_on(event: Any) -> None:
        if isinstance(event, Report) and event.round == 0:
            bench.inbox.assign(Plan(1, 0, (Span(0, 0, 32, 40),), 8, keep=frozenset({0})))
            bench.inbox.merge(FragmentUpdate(1, 0), bench.theta)

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

    assert rates(32) == pytest.approx([8 / 8, 7 / 8, 6 / 8, 5 / 8])
    assert rates(64)[1::2] == pytest.approx([7.5 / 8, 6.5 / 8, 5.5 / 8, 4.5 / 8])


@pytest.mark.slow
def test_slowdown_stretches_the_batch_time() -> None:
    def batch_s(factor: float) -> float:
        reports = Bench(testing={"slowdown": [factor]}).run(plan_of(64, batch=4)).of(Report)[2:]
        return sum(report.seconds for report in reports) / sum(report.timed_batches for report in reports)

    assert batch_s(8.0) > 3 * batch_s(1.0)


class Loop:
    """An inner loop that calls an operation of torch which has no reproducible kernel."""

    def run(self) -> None:
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)


@pytest.fixture
def reproducible() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("reproducible")
def test_operation_that_is_not_reproducible_is_refused_by_its_name() -> None:
    def loop(*_: Any) -> Loop:
        return Loop()

    (said,) = Incarnation(Job(), Source("run", 0, 1), loop).run()
    assert isinstance(said, Failed) and isinstance(said.error, ConfigError)
    assert said.error.code == "TRN005" and "put_ isn't reproducible" in said.error.what


class Exiting:
    """An inner loop whose code ends its thread."""

    def run(self) -> None:
        raise SystemExit(4)


def test_loop_that_ends_its_thread_ends_the_stream_with_an_error() -> None:
    def loop(*_: Any) -> Exiting:
        return Exiting()

    stream = Incarnation(Job(), Source("run", 0, 1), loop).run()
    with pytest.raises(RuntimeError, match=r"^SystemExit: 4 \(test_loop\.py, line \d+\)$"):
        next(stream)
