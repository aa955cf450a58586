"""One epoch of the ledger: the state of its samples, slice by slice, and the order in which workers get slices."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from hypha_ray.errors import HyphaError
from hypha_ray.types import Span, window


class LedgerError(HyphaError):
    """A use of samples that the ledger doesn't allow: twice, by another worker, or of samples that don't exist."""


class Epoch:
    """Available and used samples of each slice in one epoch, and the order in which slices are handed out.

    Slices with available samples have ranks: untouched (0), no part is assigned (1), a part is assigned (2).
    The queue is a heap of ``rank · slices + place in the order``. A key whose slice has changed its rank stays in it
    until it comes up; so every change costs O(log slices).
    """

    def __init__(self, number: int, sizes: Mapping[int, int], seed: int) -> None:
        self._number = number
        self._sizes = sizes
        self._order = sorted(sizes)
        random.Random(f"{seed}/{number}").shuffle(self._order)
        self._place = {index: place for place, index in enumerate(self._order)}
        self._queue = list(range(len(self._order)))
        self._queued = set(self._queue)
        self._free: dict[int, list[Span]] = {}
        """Available spans of every slice that has been touched."""
        self._assigned: Counter[int] = Counter()
        self.used: dict[int, list[Span]] = {}
        self.unused = self._available = sum(sizes.values())

    def restore(self, index: int, spans: list[Span]) -> None:
        """Mark samples of an untouched slice as used."""
        self._free[index] = without(Span(self._number, index, 0, self._sizes[index]), sorted(spans))
        self.used[index] = joined(spans)
        used = samples_of(spans)
        if min(span.samples for span in spans) < 1 or samples_of(self._free[index]) + used != self._sizes[index]:
            raise LedgerError("LED002", "the state has samples twice, or samples that don't exist", str(spans[0]))
        self._available -= used
        self.unused -= used
        self._file(index)

    def assign(self, samples: int, cached: AbstractSet[int], near: AbstractSet[int] = frozenset()) -> list[Span]:
        """Take up to `samples` samples, of the slices in `cached` first, and of those in `near` next."""
        samples = min(samples, self._available)
        self._available -= samples
        spans: list[Span] = []
        first = sorted(cached & self._place.keys(), key=self._place.__getitem__) if samples else []
        if near and samples:
            keys = {index: self._rank(index) for index in near & self._place.keys() - cached}
            ranked = [self._key(index, rank) for index, rank in keys.items() if rank is not None]
            first += [self._order[key % len(self._order)] for key in sorted(ranked)]
        for index in first:
            spans += (part := self._take(index, samples))
            samples -= samples_of(part)
        while samples:
            spans += (part := self._take(self._first(), samples))
            samples -= samples_of(part)
        return spans

    def give_back(self, span: Span) -> None:
        """Make assigned samples available."""
        self._free[span.slice] = joined([*self._free[span.slice], span])
        self._assigned[span.slice] -= span.samples
        self._available += span.samples
        self._file(span.slice)

    def use(self, span: Span) -> None:
        """Make assigned samples used."""
        self.used[span.slice] = joined([*self.used.get(span.slice, ()), span])
        self._assigned[span.slice] -= span.samples
        self.unused -= span.samples
        self._file(span.slice)

    def cursors(self) -> dict[int, int]:
        """Used samples of each slice that has any."""
        return {index: samples_of(spans) for index, spans in sorted(self.used.items())}

    def next_slices(self, samples: int) -> list[tuple[int, int]]:
        """First slices of the queue, with their available samples, until there are enough."""
        samples = min(samples, self._available)
        found: list[tuple[int, int]] = []
        keys: list[int] = []
        while samples > 0:
            index = self._first()
            keys.append(heapq.heappop(self._queue))
            found.append((index, samples_of(self._runs(index))))
            samples -= found[-1][1]
        for key in keys:
            heapq.heappush(self._queue, key)
        return found

    def check(self, held: Mapping[int, list[Span]]) -> None:
        """See `Ledger.check`; `held` are the assigned samples of each slice."""
        for index, size in self._sizes.items():
            spans = sorted([*self._runs(index), *held.get(index, ()), *self.used.get(index, ())])
            whole = joined(spans) == [Span(self._number, index, 0, size)]
            rank = self._rank(index)
            filed = rank is None or self._key(index, rank) in self._queued
            if not (whole and filed and self._assigned[index] == samples_of(held.get(index, ()))):
                raise LedgerError("LED004", f"slice {index} of epoch {self._number} is not in order", str(spans))
        available = sum(samples_of(self._runs(index)) for index in self._sizes)
        unused = sum(self._sizes.values()) - sum(self.cursors().values())
        if (available, unused) != (self._available, self.unused) or sorted(self._queue) != sorted(self._queued):
            raise LedgerError("LED004", f"the sums or the queue of epoch {self._number} are wrong")

    def _runs(self, index: int) -> list[Span]:
        """Available samples of a slice."""
        return self._free.get(index, [Span(self._number, index, 0, self._sizes[index])])

    def _take(self, index: int, samples: int) -> tuple[Span, ...]:
        """Assign up to `samples` samples of a slice, the first that are available."""
        runs = self._runs(index)
        taken = window(runs, 0, samples)
        if taken:
            self._free[index] = list(window(runs, samples, self._sizes[index]))
            self._assigned[index] += samples_of(taken)
            self._file(index)
        return taken

    def _first(self) -> int:
        """Next slice in the queue, which must not be empty."""
        while True:
            rank, place = divmod(self._queue[0], len(self._order))
            if rank == self._rank(self._order[place]):
                return self._order[place]
            self._queued.discard(heapq.heappop(self._queue))

    def _rank(self, index: int) -> int | None:
        """Rank of a slice; None if none of its samples is available."""
        if index not in self._free:
            return 0
        if not self._free[index]:
            return None
        return 2 if self._assigned[index] else 1

    def _key(self, index: int, rank: int) -> int:
        return rank * len(self._order) + self._place[index]

    def _file(self, index: int) -> None:
        """Put a slice into its place in the queue; a wholly available one counts as untouched."""
        if not self._assigned[index]:
            del self._assigned[index]
            if index not in self.used:
                del self._free[index]
        rank = self._rank(index)
        if rank is not None and (key := self._key(index, rank)) not in self._queued:
            heapq.heappush(self._queue, key)
            self._queued.add(key)


def samples_of(spans: Iterable[Span]) -> int:
    """Number of samples of some spans."""
    return sum(span.samples for span in spans)


def by_slice(spans: Iterable[Span]) -> dict[tuple[int, int], list[Span]]:
    """Spans of each epoch and slice."""
    found: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        found.setdefault((span.epoch, span.slice), []).append(span)
    return found


def joined(spans: Iterable[Span]) -> list[Span]:
    """Spans of one slice in order, with adjacent ones joined."""
    runs: list[Span] = []
    for span in sorted(spans):
        if runs and runs[-1].stop == span.start:
            runs[-1] = runs[-1]._replace(stop=span.stop)
        else:
            runs.append(span)
    return runs


def without(span: Span, cuts: Iterable[Span]) -> list[Span]:
    """Rest of a span without the cuts, which are of the same slice and in order."""
    left: list[Span] = []
    start = span.start
    for cut in cuts:
        if start < min(cut.start, span.stop):
            left.append(span._replace(start=start, stop=min(cut.start, span.stop)))
        start = max(start, cut.stop)
    return [*left, span._replace(start=start)] if start < span.stop else left
