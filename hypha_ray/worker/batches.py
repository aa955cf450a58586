"""Slices held by a worker, and the batches cut from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hypha_ray.types import Arrays, Samples, Span, joined, window
from hypha_ray.worker.interrupts import Interruptible


def order(seed: int, epoch: int, slice_index: int, samples: int) -> npt.NDArray[np.int64]:
    """The order in which an epoch goes through a slice: the same on every machine."""
    return np.random.default_rng([seed, epoch, slice_index]).permutation(samples)


class BatchSource(Interruptible):
    """Holds slices, and returns batches of spans. One thread adds slices, another one takes batches.

    Arrays may be read-only views of the object store; batches are always fresh copies.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._slices: dict[int, Arrays] = {}
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def put(self, index: int, arrays: Arrays) -> None:
        """Add a slice. Idempotent."""
        with self._changed:
            self._slices.setdefault(index, arrays)
            self._changed.notify_all()

    def keep(self, indices: Collection[int]) -> None:
        """Drop every slice but these."""
        with self._changed:
            self._slices = {index: arrays for index, arrays in self._slices.items() if index in indices}
            self._orders = {key: rows for key, rows in self._orders.items() if key[1] in indices}

    def batch(self, spans: Sequence[Span], start: int, size: int, shuffled: bool = True) -> Samples:
        """Samples ``start … start + size - 1`` of the spans taken together; waits for slices on their way.

        Shuffled spans count in their epoch's order, others in the order of the file.
        """
        return joined([self._rows(span, shuffled) for span in window(spans, start, start + size)])

    def upcoming(self, spans: Sequence[Span], start: int, size: int, waits: bool) -> Iterator[Samples]:
        """Batches from ``start`` on, up to the last one; without waiting, up to the first whose slices aren't there."""
        samples = sum(span.samples for span in spans)
        for first in range(start, samples, size):
            part = window(spans, first, min(first + size, samples))
            with self._changed:
                if not waits and not all(span.slice in self._slices for span in part):
                    return
                rows = [self._rows(span, shuffled=True) for span in part]
            yield joined(rows)

    def _rows(self, span: Span, shuffled: bool) -> Samples:
        arrays = self._slice(span.slice)
        if not shuffled:
            taken = {name: np.array(array[span.start : span.stop]) for name, array in arrays.items()}
            return Samples(taken, _keys(span, np.arange(span.start, span.stop)))
        key = (span.epoch, span.slice)
        if key not in self._orders:
            self._forget_orders(span)
            self._orders[key] = order(self._seed, *key, len(next(iter(arrays.values()))))
        rows = self._orders[key][span.start : span.stop]
        return Samples({name: array[rows] for name, array in arrays.items()}, _keys(span, rows))

    def _forget_orders(self, span: Span) -> None:
        """Drop a slice's orders of earlier epochs, which would otherwise accumulate."""
        old = [key for key in self._orders if key[1] == span.slice and key[0] < span.epoch - 1]
        for key in old:
            del self._orders[key]

    def _slice(self, index: int) -> Arrays:
        with self._changed:
            self._wait(lambda: index in self._slices)
            return self._slices[index]


def _keys(span: Span, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the keys of these rows of a span's slice."""
    keys = np.empty((len(rows), 3), np.int64)
    keys[:, 0], keys[:, 1], keys[:, 2] = span.epoch, span.slice, rows
    return keys
