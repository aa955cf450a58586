"""Account of the samples of several datasets that are mixed by weights: a ledger for each, with epochs of its own.

Each batch has samples of all datasets. Weights w add up to 1; a worker that has been given n samples has w·n of each
dataset, to one sample. Samples that are taken back no longer count, so later batches make up for them.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from hypha_ray.scheduler.ledger.epoch import LedgerError
from hypha_ray.scheduler.ledger.ledger import Ledger
from hypha_ray.types import SliceInfo, Span, dataset_of, window


class Mixture:
    """The books of all datasets of a mixture; it is used like a `Ledger`.

    Args:
        slices: the train slices of all datasets, which `dataset_of` tells apart.
        weights: weight of each dataset.
        seed: see `Ledger`.
        most: see `Ledger`.
        used: see `Ledger.restore`.
        shares: `shares` of the last commit: used samples of each worker, by dataset.

    """

    def __init__(
        self,
        slices: Sequence[SliceInfo],
        weights: Sequence[float],
        seed: int,
        most: int | None,
        used: Mapping[str, Any],
        shares: Mapping[str, Sequence[int]],
    ) -> None:
        self._weights = [weight / sum(weights) for weight in weights]
        self._most = most
        self._ledgers = []
        for number in range(len(weights)):
            own = [info for info in slices if dataset_of(info.index) == number]
            part = {"epoch": used["epoch"], "used": [span for span in used["used"] if dataset_of(span[1]) == number]}
            self._ledgers.append(Ledger.restore(own, seed, part, most))
        self._used = {int(worker): Counter(dict(enumerate(counts))) for worker, counts in shares.items()}
        """Used samples of each worker, by dataset."""

    def assign(self, worker: int, samples: int, cached: Collection[int] = (), batch: int = 1) -> tuple[Span, ...]:
        """See `Ledger.assign`; a worker trains on batches of `batch` samples, in order, each of which is mixed."""
        if self._most is not None and samples > self._most:
            raise LedgerError("LED005", f"too much for worker {worker}", f"{samples} samples", f"up to {self._most}")
        deals = self._deals(self._counts(worker), samples, batch)
        taken = [
            ledger.assign(worker, sum(deal[number] for deal in deals), cached)
            for number, ledger in enumerate(self._ledgers)
        ]
        return tuple(_dealt(deals, taken))

    def release(self, worker: int, keep: Sequence[Span] = ()) -> None:
        """See `Ledger.release`."""
        for number, ledger in enumerate(self._ledgers):
            ledger.release(worker, _of(number, keep))

    def commit(self, deltas: Mapping[int, Sequence[Span]]) -> None:
        """See `Ledger.commit`."""
        for number, ledger in enumerate(self._ledgers):
            ledger.commit({worker: _of(number, spans) for worker, spans in deltas.items()})
        for worker, spans in deltas.items():
            self._used.setdefault(worker, Counter()).update(_counted(spans))

    @property
    def epoch(self) -> int:
        """The oldest epoch that isn't wholly used, over all datasets."""
        return min(ledger.epoch for ledger in self._ledgers)

    def cursors(self) -> dict[int, int]:
        """Used samples of each slice in the oldest epoch; all of them, in a dataset that has completed it."""
        return self._of_epoch(self.epoch)

    def ahead(self) -> dict[int, dict[int, int]]:
        """The same for newer epochs; those that a dataset has completed are left out."""
        found: dict[int, dict[int, int]] = {}
        for ledger in self._ledgers:
            own = ledger.ahead() | ({ledger.epoch: ledger.cursors()} if ledger.epoch > self.epoch else {})
            for number, cursors in own.items():
                found.setdefault(number, {}).update(cursors)
        return {number: dict(sorted(found[number].items())) for number in sorted(found) if found[number]}

    def shares(self) -> dict[str, list[int]]:
        """Used samples of each worker by dataset, as plain JSON, for the attempt that may follow."""
        numbers = range(len(self._ledgers))
        return {str(worker): [counts[number] for number in numbers] for worker, counts in sorted(self._used.items())}

    def held(self, worker: int) -> tuple[Span, ...]:
        """Samples that a worker holds, dataset by dataset."""
        return tuple(chain.from_iterable(ledger.held.get(worker, ()) for ledger in self._ledgers))

    def upcoming(self, samples: int) -> tuple[int, ...]:
        """See `Ledger.upcoming`."""
        parts = [
            ledger.upcoming(math.ceil(samples * weight))
            for ledger, weight in zip(self._ledgers, self._weights, strict=True)
        ]
        return tuple(index for row in zip_longest(*parts) for index in row if index is not None)

    def check(self) -> None:
        """See `Ledger.check`."""
        for ledger in self._ledgers:
            ledger.check()

    def _counts(self, worker: int) -> Counter[int]:
        """Samples that a worker has used or holds, by dataset."""
        return _counted(self.held(worker)) + self._used.get(worker, Counter())

    def _deals(self, counts: Counter[int], samples: int, batch: int) -> list[list[int]]:
        """Samples of each dataset in each batch: those that bring the worker nearest to its weights."""
        deals = []
        while samples > 0:
            size = min(batch, samples)
            deals.append(_deal([counts[number] for number in range(len(self._weights))], self._weights, size))
            counts.update(dict(enumerate(deals[-1])))
            samples -= size
        return deals

    def _of_epoch(self, number: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for ledger in self._ledgers:
            found |= ledger.cursors() if ledger.epoch == number else ledger.sizes
        return dict(sorted(found.items()))


def _deal(counts: Sequence[int], weights: Sequence[float], size: int) -> list[int]:
    """Divide a batch by largest remainder, so that the counts after it come nearest to their weights."""
    total = sum(counts) + size
    missing = [max(0.0, weight * total - count) for weight, count in zip(weights, counts, strict=True)]
    scale = size / sum(missing)
    wanted = [part * scale for part in missing]
    deal = [int(part) for part in wanted]
    order = sorted(range(len(deal)), key=lambda number: (deal[number] - wanted[number], number))
    for number in order[: size - sum(deal)]:
        deal[number] += 1
    return deal


def _dealt(deals: Iterable[Sequence[int]], taken: Sequence[tuple[Span, ...]]) -> Iterable[Span]:
    """Spans of the datasets in the order of batches."""
    rests = [deque(spans) for spans in taken]
    for deal in deals:
        for rest, samples in zip(rests, deal, strict=True):
            left = samples
            while left:
                span = rest.popleft()
                yield from window([span], 0, left)
                rest.extendleft(window([span], left, span.samples))
                left -= min(left, span.samples)


def _of(number: int, spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if dataset_of(span.slice) == number]


def _counted(spans: Iterable[Span]) -> Counter[int]:
    """Number of samples by dataset."""
    counts: Counter[int] = Counter()
    for span in spans:
        counts[dataset_of(span.slice)] += span.samples
    return counts
