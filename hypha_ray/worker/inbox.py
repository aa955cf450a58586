"""Inbox of a worker: slices, which batches are cut from, and orders, until the inner loop takes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hypha_ray.codec import difference_codec
from hypha_ray.types import Arrays, Flat, FragmentUpdate, Layout, Plan, Samples, Span, WeightsVersion, joined, window
from hypha_ray.worker.interrupts import Interruptible


class DifferenceDecoder:
    """Turns differences into weights.

    Args:
        name: the codec's.
        options: the codec's own options.

    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        self._codec = difference_codec(name, options)
        self._theta: dict[int, Flat] = {}
        self._spare: dict[int, Flat] = {}
        """Arrays of the round before the last: the last one's may still be read."""

    def take(self, piece: FragmentUpdate, weights: Flat) -> Flat:
        """Weights of a fragment: those received, or the previous ones with the received difference."""
        fragment = piece.fragment
        if self._codec is None:
            return weights
        if not piece.difference:
            self._theta[fragment] = weights
            self._spare.pop(fragment, None)
            return weights
        from hypha_ray.codec.feedback import advance

        before = self._theta[fragment]
        new = advance(self._codec, before, weights, self._spare.get(fragment))
        self._theta[fragment] = new
        if all(array.flags.writeable for array in before.values()):  # They aren't the object store's.
            self._spare[fragment] = before
        return new


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


class Arrived(NamedTuple):
    """New global weights by fragment: all of them, or the changed ones."""

    version: WeightsVersion
    whole: bool
    fragments: dict[int, Flat]


class Inbox(Interruptible):
    """Orders for the inner loop, written by the control thread. Each may arrive twice, and in any order.

    Args:
        downward: codec of differences between weights.
        options: the codec's own options.

    """

    def __init__(self, downward: str = "fp32", options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._held = DifferenceDecoder(downward, options)
        self._plan: Plan | None = None
        self._weights: dict[WeightsVersion, dict[int, tuple[FragmentUpdate, Flat]]] = {}
        self._state: Flat | None = None
        self._layout: Layout | None = None
        self._restored = False
        self.version: WeightsVersion | None = None
        """Version of the weights that the inner loop took last; None before the first."""

    def assign(self, plan: Plan) -> bool:
        """Store a plan, unless a newer one is there; returns whether it is the newest."""
        with self._changed:
            if self._plan is not None and _order(plan) <= _order(self._plan):
                return False
            self._plan = plan
            self._changed.notify_all()
            return True

    def merge(self, piece: FragmentUpdate, weights: Flat) -> None:
        """Store a fragment of new weights, unless the inner loop has them."""
        with self._changed:
            if self.lacks(piece.version):
                self._weights.setdefault(piece.version, {})[piece.fragment] = piece, weights
                self._changed.notify_all()

    def lacks(self, version: WeightsVersion) -> bool:
        """Whether the inner loop has taken only older weights, or none."""
        return self.version is None or self.version < version

    def restore(self, state: Flat) -> None:
        """Store the inner state with which the worker's predecessor ended."""
        with self._changed:
            if not self._restored:
                self._state = state
                self._changed.notify_all()

    def describe(self, layout: Layout) -> None:
        """Store the layout, for a reader that doesn't build the model."""
        with self._changed:
            self._layout = layout
            self._changed.notify_all()

    def layout(self) -> Layout:
        """Layout of the tensors; waits for it."""
        with self._changed:
            self._wait(lambda: self._layout is not None)
            assert self._layout is not None
            return self._layout

    def plan(self, round_number: int) -> Plan:
        """The newest plan, which is for this round or a later one; waits for it."""
        with self._changed:
            self._wait(lambda: self._plan is not None and self._plan.round >= round_number)
            assert self._plan is not None
            return self._plan

    def correction(self, idle: Plan) -> Plan | None:
        """The newer version of a plan that gives nothing to do; None once a later round's is there. Waits."""
        with self._changed:
            self._wait(lambda: self._plan is not None and _order(self._plan) > _order(idle))
            assert self._plan is not None
            return self._plan if self._plan.round == idle.round else None

    def weights(self, due: WeightsVersion | None = None) -> Arrived:
        """The weights to take next, once all of their fragments are there.

        A worker without the previous weights takes whole ones, and so does one for which newer whole ones are there.

        Args:
            due: newest version that is wanted, unless there are only newer ones; None: the newest there is.

        """
        with self._changed:
            self._wait(lambda: self._following(due) is not None)
            version = self.version = self._following(due)
            assert version is not None
            pieces = self._weights[version]
            self._weights = {later: parts for later, parts in self._weights.items() if later > version}
        flats = {fragment: self._held.take(piece, flat) for fragment, (piece, flat) in pieces.items()}
        return Arrived(version, all(piece.whole for piece, _ in pieces.values()), flats)

    def state(self) -> Flat | None:
        """The predecessor's inner state, which is given out once, then None; waits for it."""
        with self._changed:
            self._wait(lambda: self._restored or self._state is not None)
            state = self._state
            self._state = None
            self._restored = True
            return state

    def _following(self, due: WeightsVersion | None) -> WeightsVersion | None:
        """Version of the weights to take next; None while they aren't there."""
        pieces = {version: [piece for piece, _ in those.values()] for version, those in self._weights.items()}
        complete = {version: those for version, those in pieces.items() if len(those) == those[0].of}
        whole = [version for version, those in complete.items() if those[0].whole]
        wanted = [version for version in whole if due is None or version <= due]
        following = None if self.version is None else WeightsVersion(self.version + 1)
        if not wanted and following in complete:
            return following
        return max(wanted or whole, default=None)


def _order(plan: Plan) -> tuple[int, int]:
    """By which the newer one of two plans is known."""
    return plan.round, plan.version
