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
    """Ledgers of all datasets of a mixture, with the methods of one `Ledger`.

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
            dataset_slices = [info for info in slices if dataset_of(info.index) == number]
            used_spans = [span for span in used["used"] if dataset_of(span[1]) == number]
            state = {"epoch": used["epoch"], "used": used_spans}
            self._ledgers.append(Ledger.restore(dataset_slices, seed, state, most))
        self._used: dict[int, Counter[int]] = {}
        """Used samples of each worker, by dataset."""
        for worker, counts in shares.items():
            self._used[int(worker)] = Counter(dict(enumerate(counts)))

    def assign(self, worker: int, samples: int, cached: Collection[int] = (), batch: int = 1) -> tuple[Span, ...]:
        """Give samples to a worker, see `Ledger.assign`; each batch of `batch` samples in a row is mixed."""
        if self._most is not None and samples > self._most:
            raise LedgerError("LED005", f"too much for worker {worker}", f"{samples} samples", f"up to {self._most}")
        deals = self._deals(self._counts(worker), samples, batch)
        spans_by_dataset: list[tuple[Span, ...]] = []
        for number, ledger in enumerate(self._ledgers):
            dataset_samples = sum(deal[number] for deal in deals)
            spans_by_dataset.append(ledger.assign(worker, dataset_samples, cached))
        return tuple(_interleave(deals, spans_by_dataset))

    def release(self, worker: int, keep: Sequence[Span] = ()) -> None:
        """Make all samples of a worker available again, except those to keep."""
        for number, ledger in enumerate(self._ledgers):
            ledger.release(worker, _of_dataset(number, keep))

    def commit(self, deltas: Mapping[int, Sequence[Span]]) -> None:
        """Mark the samples of workers' deltas as used; their other samples stay assigned."""
        for number, ledger in enumerate(self._ledgers):
            ledger.commit({worker: _of_dataset(number, spans) for worker, spans in deltas.items()})
        for worker, spans in deltas.items():
            used = self._used.setdefault(worker, Counter())
            used.update(_count_by_dataset(spans))

    @property
    def epoch(self) -> int:
        """The oldest epoch that isn't wholly used, over all datasets."""
        return min(ledger.epoch for ledger in self._ledgers)

    def cursors(self) -> dict[int, int]:
        """Used samples of each slice in the oldest epoch; all of them, in a dataset that has completed it."""
        return self._of_epoch(self.epoch)

    def ahead(self) -> dict[int, dict[int, int]]:
        """Used samples of each slice in newer epochs; epochs that a dataset has completed are left out."""
        by_epoch: dict[int, dict[int, int]] = {}
        for ledger in self._ledgers:
            newer = ledger.ahead()
            if ledger.epoch > self.epoch:
                newer[ledger.epoch] = ledger.cursors()
            for number, cursors in newer.items():
                by_epoch[number] = by_epoch.get(number, {}) | cursors
        ahead: dict[int, dict[int, int]] = {}
        for number, cursors in sorted(by_epoch.items()):
            if cursors:
                ahead[number] = dict(sorted(cursors.items()))
        return ahead

    def shares(self) -> dict[str, list[int]]:
        """Used samples of each worker by dataset, as plain JSON, for the attempt that may follow."""
        numbers = range(len(self._ledgers))
        shares: dict[str, list[int]] = {}
        for worker, counts in sorted(self._used.items()):
            shares[str(worker)] = [counts[number] for number in numbers]
        return shares

    def held(self, worker: int) -> tuple[Span, ...]:
        """Samples that a worker holds, dataset by dataset."""
        spans: list[Span] = []
        for ledger in self._ledgers:
            spans += ledger.held.get(worker, ())
        return tuple(spans)

    def upcoming(self, samples: int) -> tuple[int, ...]:
        """Slices from which the next samples will probably be assigned, the datasets in turn."""
        slices_by_dataset: list[tuple[int, ...]] = []
        for ledger, weight in zip(self._ledgers, self._weights, strict=True):
            slices_by_dataset.append(ledger.upcoming(math.ceil(samples * weight)))
        in_turn = chain.from_iterable(zip_longest(*slices_by_dataset))
        return tuple(index for index in in_turn if index is not None)

    def check(self) -> None:
        """Check the state of every sample of all datasets."""
        for ledger in self._ledgers:
            ledger.check()

    def _counts(self, worker: int) -> Counter[int]:
        """Samples that a worker has used or holds, by dataset."""
        return _count_by_dataset(self.held(worker)) + self._used.get(worker, Counter())

    def _deals(self, counts: Counter[int], samples: int, batch: int) -> list[list[int]]:
        """Samples of each dataset in each batch: those that bring the worker nearest to its weights."""
        deals = []
        numbers = range(len(self._weights))
        while samples > 0:
            size = min(batch, samples)
            deal = _deal([counts[number] for number in numbers], self._weights, size)
            deals.append(deal)
            counts.update(dict(enumerate(deal)))
            samples -= size
        return deals

    def _of_epoch(self, number: int) -> dict[int, int]:
        cursors: dict[int, int] = {}
        for ledger in self._ledgers:
            cursors |= ledger.cursors() if ledger.epoch == number else ledger.sizes
        return dict(sorted(cursors.items()))


def _deal(counts: Sequence[int], weights: Sequence[float], size: int) -> list[int]:
    """Divide a batch by largest remainder, so that the counts after it come nearest to their weights."""
    total = sum(counts) + size
    missing = [max(0.0, weight * total - count) for weight, count in zip(weights, counts, strict=True)]
    scale = size / sum(missing)
    quotas = [part * scale for part in missing]
    deal = [int(quota) for quota in quotas]
    order = sorted(range(len(deal)), key=lambda number: (deal[number] - quotas[number], number))
    for number in order[: size - sum(deal)]:
        deal[number] += 1
    return deal


def _interleave(deals: Iterable[Sequence[int]], spans_by_dataset: Sequence[tuple[Span, ...]]) -> Iterable[Span]:
    """Spans of the datasets in the order of batches."""
    queues = [deque(spans) for spans in spans_by_dataset]
    for deal in deals:
        for queue, samples in zip(queues, deal, strict=True):
            missing = samples
            while missing:
                span = queue.popleft()
                yield from window([span], 0, missing)
                queue.extendleft(window([span], missing, span.samples))
                missing -= min(missing, span.samples)


def _of_dataset(number: int, spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if dataset_of(span.slice) == number]


def _count_by_dataset(spans: Iterable[Span]) -> Counter[int]:
    """Number of samples by dataset."""
    counts: Counter[int] = Counter()
    for span in spans:
        counts[dataset_of(span.slice)] += span.samples
    return counts
