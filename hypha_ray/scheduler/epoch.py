"""One epoch of the ledger: the state of its samples, slice by slice, and the order in which workers get slices."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from hypha_ray.errors import HyphaError
from hypha_ray.types import Span, samples_of, window


class LedgerError(HyphaError):
    """A use of samples that the ledger doesn't allow: twice, by another worker, or of samples that don't exist."""


class Epoch:
    """Available and used samples of each slice in one epoch, and the order in which slices are handed out.

    Slices with available samples have ranks: untouched (0), no part is assigned (1), a part is assigned (2).
    The queue is a heap of ``rank · slices + position in the order``. A key whose slice has changed its rank stays in
    it until it comes up; so every change costs O(log slices).
    """

    def __init__(self, epoch_number: int, sizes: Mapping[int, int], seed: int) -> None:
        self._epoch_number = epoch_number
        self._sizes = sizes
        self._order = sorted(sizes)
        shuffler = random.Random(f"{seed}/{epoch_number}")
        shuffler.shuffle(self._order)
        self._position = {index: position for position, index in enumerate(self._order)}
        self._queue = list(range(len(self._order)))
        self._queued = set(self._queue)
        self._free: dict[int, list[Span]] = {}
        """Available spans of every slice that has been touched."""
        self._assigned: Counter[int] = Counter()
        self._exhausted: set[int] = set()
        """Slices without available samples."""
        self.used: dict[int, list[Span]] = {}
        self._cursors: dict[int, int] = {}
        """Number of used samples of each slice that has any."""
        self.unused = self._available = sum(sizes.values())

    def restore(self, index: int, spans: list[Span]) -> None:
        """Mark samples of an untouched slice as used."""
        self._free[index] = without(Span(self._epoch_number, index, 0, self._sizes[index]), sorted(spans))
        self.used[index] = joined(spans)
        used_samples = samples_of(spans)
        self._cursors[index] = used_samples
        available_samples = samples_of(self._free[index])
        if min(span.samples for span in spans) < 1 or available_samples + used_samples != self._sizes[index]:
            raise LedgerError("LED002", "the state has samples twice, or samples that don't exist", str(spans[0]))
        self._available -= used_samples
        self.unused -= used_samples
        self._enqueue(index)

    def assign(
        self, samples: int, cached: AbstractSet[int], nearby_slices: AbstractSet[int] = frozenset()
    ) -> list[Span]:
        """Take up to `samples` samples, of the slices in `cached` first, and of those in `nearby_slices` next."""
        samples = min(samples, self._available)
        if not samples:
            return []
        self._available -= samples
        spans: list[Span] = []
        available = (cached - self._exhausted) & self._position.keys()
        preferred = sorted(available, key=self._position.__getitem__)
        if nearby_slices:
            preferred += self._in_order(nearby_slices & self._position.keys() - cached)
        for index in preferred:
            if not samples:
                break
            slice_spans = self._assign_from(index, samples)
            spans += slice_spans
            samples -= samples_of(slice_spans)
        while samples:
            slice_spans = self._assign_from(self._next_slice(), samples)
            spans += slice_spans
            samples -= samples_of(slice_spans)
        return spans

    def _in_order(self, slices: AbstractSet[int]) -> list[int]:
        """Slices with available samples, in the order of the queue."""
        keys: list[int] = []
        for index in slices:
            rank = self._rank(index)
            if rank is not None:
                keys.append(self._key(index, rank))
        return [self._order[key % len(self._order)] for key in sorted(keys)]

    def give_back(self, span: Span) -> None:
        """Make assigned samples available."""
        free = self._free[span.slice]
        self._free[span.slice] = joined([*free, span])
        self._assigned[span.slice] -= span.samples
        self._available += span.samples
        self._enqueue(span.slice)

    def use(self, span: Span) -> None:
        """Make assigned samples used."""
        used_spans = self.used.get(span.slice)
        self.used[span.slice] = [span] if used_spans is None else joined([*used_spans, span])
        self._cursors[span.slice] = self._cursors.get(span.slice, 0) + span.samples
        self._assigned[span.slice] -= span.samples
        self.unused -= span.samples
        self._enqueue(span.slice)

    @property
    def available(self) -> int:
        """Samples that are neither assigned nor used."""
        return self._available

    def cursors(self) -> dict[int, int]:
        """Used samples of each slice that has any."""
        self._cursors = {index: self._cursors[index] for index in sorted(self._cursors)}  # The next sort has few new.
        return self._cursors.copy()

    def next_slices(self, samples: int) -> list[tuple[int, int]]:
        """First slices of the queue, with their available samples, until there are enough."""
        samples = min(samples, self._available)
        slices: list[tuple[int, int]] = []
        keys: list[int] = []
        while samples > 0:
            index = self._next_slice()
            keys.append(heapq.heappop(self._queue))
            available = samples_of(self._runs(index))
            slices.append((index, available))
            samples -= available
        for key in keys:
            heapq.heappush(self._queue, key)
        return slices

    def check(self, assigned: Mapping[int, list[Span]]) -> None:
        """Check that every sample is in one state; `assigned` has the assigned spans of each slice."""
        available_samples = 0
        for index, slice_samples in self._sizes.items():
            runs = self._runs(index)
            available_samples += samples_of(runs)
            assigned_spans = assigned.get(index, [])
            spans = [*runs, *assigned_spans, *self.used.get(index, ())]
            whole_slice = [Span(self._epoch_number, index, 0, slice_samples)]
            is_whole = spans == whole_slice or joined(spans) == whole_slice
            rank = self._rank(index)
            is_queued = rank is None or self._key(index, rank) in self._queued
            if not (is_whole and is_queued and self._assigned[index] == samples_of(assigned_spans)):
                raise LedgerError("LED004", f"slice {index} of epoch {self._epoch_number} is not in order", str(spans))
        used_samples = sum(self._cursors.values())
        unused_samples = sum(self._sizes.values()) - used_samples
        if (available_samples, unused_samples) != (self._available, self.unused) or sorted(self._queue) != sorted(
            self._queued
        ):
            raise LedgerError("LED004", f"the sums or the queue of epoch {self._epoch_number} are wrong")

    def _runs(self, index: int) -> list[Span]:
        """Available samples of a slice."""
        whole_slice = Span(self._epoch_number, index, 0, self._sizes[index])
        return self._free.get(index, [whole_slice])

    def _assign_from(self, index: int, samples: int) -> tuple[Span, ...]:
        """Assign up to `samples` samples of a slice, the first that are available."""
        runs = self._runs(index)
        spans = window(runs, 0, samples)
        if spans:
            self._free[index] = list(window(runs, samples, self._sizes[index]))
            self._assigned[index] += samples_of(spans)
            self._enqueue(index)
        return spans

    def _next_slice(self) -> int:
        """Next slice in the queue, which must not be empty."""
        while True:
            rank, position = divmod(self._queue[0], len(self._order))
            index = self._order[position]
            if rank == self._rank(index):
                return index
            self._queued.discard(heapq.heappop(self._queue))

    def _rank(self, index: int) -> int | None:
        """Rank of a slice; None if none of its samples is available."""
        if index not in self._free:
            return 0
        if not self._free[index]:
            return None
        return 2 if self._assigned[index] else 1

    def _key(self, index: int, rank: int) -> int:
        return rank * len(self._order) + self._position[index]

    def _enqueue(self, index: int) -> None:
        """Put a slice into its place in the queue; a wholly available one counts as untouched."""
        if not self._assigned[index]:
            del self._assigned[index]
            if index not in self.used:
                del self._free[index]
        rank = self._rank(index)
        if rank is None:
            self._exhausted.add(index)
            return
        self._exhausted.discard(index)
        key = self._key(index, rank)
        if key not in self._queued:
            heapq.heappush(self._queue, key)
            self._queued.add(key)


def by_slice(spans: Iterable[Span]) -> dict[tuple[int, int], list[Span]]:
    """Spans of each epoch and slice."""
    groups: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        group = groups.setdefault((span.epoch, span.slice), [])
        group.append(span)
    return groups


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
    parts: list[Span] = []
    start = span.start
    for cut in cuts:
        stop = min(cut.start, span.stop)
        if start < stop:
            parts.append(span._replace(start=start, stop=stop))
        start = max(start, cut.stop)
    if start < span.stop:
        parts.append(span._replace(start=start))
    return parts
