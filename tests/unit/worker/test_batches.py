"""Batches cut from spans."""

from __future__ import annotations

import gc
from threading import Thread

import numpy as np

from hypha_ray.types import Span, window
from hypha_ray.worker.incarnation import BatchSource, epoch_order


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
