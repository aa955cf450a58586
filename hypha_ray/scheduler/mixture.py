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

from hypha_ray.config.schema import beside_largest, largest
from hypha_ray.scheduler.epoch import LedgerError
from hypha_ray.scheduler.ledger import Ledger
from hypha_ray.types import SliceInfo, Span, dataset_of, window


class Mixture:
    """Ledgers of all datasets of a mixture, with the methods of one `Ledger`.

    Args:
        slices: the train slices of all datasets, which `dataset_of` tells apart.
        weights: weight of each dataset.
        seed: see `Ledger`.
        most_samples: see `Ledger`.
        used_state: see `Ledger.restore`.
        shares: `shares` of the last commit: used samples of each worker, by dataset.
        epochs: epochs of the largest dataset after which no samples are left, in the whole mixture; the others have
            their shares until then. None: there are always more.

    """

    def __init__(
        self,
        slices: Sequence[SliceInfo],
        weights: Sequence[float],
        seed: int,
        most_samples: int | None,
        used_state: Mapping[str, Any],
        shares: Mapping[str, Sequence[int]],
        epochs: int | None = None,
    ) -> None:
        self._weights = [weight / sum(weights) for weight in weights]
        self._most_samples = most_samples
        self._ledgers = []
        slices_by_dataset: list[list[SliceInfo]] = []
        sizes: list[int] = []
        for dataset in range(len(weights)):
            dataset_slices = [info for info in slices if dataset_of(info.index) == dataset]
            slices_by_dataset.append(dataset_slices)
            sizes.append(sum(info.samples for info in dataset_slices))
        self._largest = largest(sizes)
        self._others: int | None = None
        """Samples of all datasets but the largest until the end of the run; None without a last epoch."""
        if epochs is not None:
            self._others = beside_largest(sizes, weights, epochs)
        for dataset, dataset_slices in enumerate(slices_by_dataset):
            used_spans = [span for span in used_state["used"] if dataset_of(span[1]) == dataset]
            state = {"epoch": used_state["epoch"], "used": used_spans}
            limit = epochs if dataset == self._largest else None
            self._ledgers.append(Ledger.restore(dataset_slices, seed, state, most_samples, limit))
        self._used: dict[int, Counter[int]] = {}
        """Used samples of each worker, by dataset."""
        for worker, counts in shares.items():
            self._used[int(worker)] = Counter(dict(enumerate(counts)))
        self._others_used = sum(self._of_others(counts) for counts in self._used.values())
        """Used samples of all datasets but the largest."""

    def assign(self, worker: int, samples: int, cached: Collection[int] = (), batch: int = 1) -> tuple[Span, ...]:
        """Give samples to a worker, see `Ledger.assign`; each batch of `batch` samples in a row is mixed.

        At the end of the last epoch, batches have of each dataset what is left.
        """
        if self._most_samples is not None and samples > self._most_samples:
            raise LedgerError(
                "LED005", f"too much for worker {worker}", f"{samples} samples", f"up to {self._most_samples}"
            )
        if self._others is not None:
            samples = min(samples, self.available)
        deals = self._deals(self._counts(worker), samples, batch)
        spans_by_dataset: list[tuple[Span, ...]] = []
        for dataset, ledger in enumerate(self._ledgers):
            dataset_samples = sum(deal[dataset] for deal in deals)
            spans_by_dataset.append(ledger.assign(worker, dataset_samples, cached))
        return tuple(_interleave(deals, spans_by_dataset))

    def release(self, worker: int, kept_spans: Sequence[Span] = ()) -> None:
        """Make all samples of a worker available again, except those to keep."""
        for dataset, ledger in enumerate(self._ledgers):
            ledger.release(worker, _of_dataset(dataset, kept_spans))

    def commit(self, deltas: Mapping[int, Sequence[Span]]) -> None:
        """Mark the samples of workers' deltas as used; their other samples stay assigned."""
        for dataset, ledger in enumerate(self._ledgers):
            ledger.commit({worker: _of_dataset(dataset, spans) for worker, spans in deltas.items()})
        for worker, spans in deltas.items():
            used_by_dataset = self._used.setdefault(worker, Counter())
            counts = _count_by_dataset(spans)
            used_by_dataset.update(counts)
            self._others_used += self._of_others(counts)

    @property
    def unused(self) -> int:
        """Samples that no commit has used, up to the last epoch; there must be a last one."""
        assert self._others is not None
        return self._ledgers[self._largest].unused + max(0, self._others - self._others_used)

    @property
    def available(self) -> int:
        """Samples that are neither assigned nor used, up to the last epoch; there must be a last one."""
        return sum(self._room())

    def _room(self) -> tuple[int, int]:
        """Available samples of the largest dataset, and of the others together, up to the last epoch."""
        assert self._others is not None
        assigned = 0
        for dataset, ledger in enumerate(self._ledgers):
            if dataset != self._largest:
                assigned += ledger.assigned
        available = max(0, self._others - self._others_used - assigned)
        return self._ledgers[self._largest].available, available

    def _of_others(self, counts: Mapping[int, int]) -> int:
        """Samples of all datasets but the largest, of counts by dataset."""
        return sum(count for dataset, count in counts.items() if dataset != self._largest)

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
            for epoch_number, cursors in newer.items():
                by_epoch[epoch_number] = by_epoch.get(epoch_number, {}) | cursors
        newer_cursors: dict[int, dict[int, int]] = {}
        for epoch_number, cursors in sorted(by_epoch.items()):
            if cursors:
                newer_cursors[epoch_number] = dict(sorted(cursors.items()))
        return newer_cursors

    def shares(self) -> dict[str, list[int]]:
        """Used samples of each worker by dataset, as plain JSON, for the attempt that may follow."""
        datasets = range(len(self._ledgers))
        shares: dict[str, list[int]] = {}
        for worker, counts in sorted(self._used.items()):
            shares[str(worker)] = [counts[dataset] for dataset in datasets]
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
        datasets = range(len(self._weights))
        own_room = others_room = samples
        if self._others is not None:
            own_room, others_room = self._room()
        while samples > 0:
            batch_samples = min(batch, samples)
            dataset_counts = [counts[dataset] for dataset in datasets]
            deal = _deal(dataset_counts, self._weights, batch_samples)
            largest_samples = _within(deal[self._largest], batch_samples - others_room, own_room)
            if largest_samples != deal[self._largest]:
                deal = _deal_beside(self._largest, largest_samples, dataset_counts, self._weights, batch_samples)
            own_room -= largest_samples
            others_room -= batch_samples - largest_samples
            deals.append(deal)
            counts.update(dict(enumerate(deal)))
            samples -= batch_samples
        return deals

    def _of_epoch(self, epoch_number: int) -> dict[int, int]:
        cursors: dict[int, int] = {}
        for ledger in self._ledgers:
            cursors |= ledger.cursors() if ledger.epoch == epoch_number else ledger.sizes
        return dict(sorted(cursors.items()))


def _deal(counts: Sequence[int], weights: Sequence[float], batch_samples: int) -> list[int]:
    """Divide a batch by largest remainder, so that the counts after it come nearest to their weights."""
    total = sum(counts) + batch_samples
    missing = [max(0.0, weight * total - count) for weight, count in zip(weights, counts, strict=True)]
    scale = batch_samples / sum(missing)
    quotas = [part * scale for part in missing]
    batch_deal = [int(quota) for quota in quotas]
    order = sorted(range(len(batch_deal)), key=lambda number: (batch_deal[number] - quotas[number], number))
    for dataset in order[: batch_samples - sum(batch_deal)]:
        batch_deal[dataset] += 1
    return batch_deal


def _within(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)


def _deal_beside(
    dataset: int, samples: int, counts: Sequence[int], weights: Sequence[float], batch_samples: int
) -> list[int]:
    """Divide a batch that has so many samples of one dataset; the others have the rest by their weights."""
    other_samples = batch_samples - samples
    batch_deal = [0] * len(counts)
    if other_samples:
        other_counts = [*counts]
        other_counts[dataset] = 0
        share = 1 - weights[dataset]
        other_weights: list[float] = []
        for index, weight in enumerate(weights):
            other_weights.append(0.0 if index == dataset else weight / share)
        batch_deal = _deal(other_counts, other_weights, other_samples)
    batch_deal[dataset] = samples
    return batch_deal


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


def _of_dataset(dataset: int, spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if dataset_of(span.slice) == dataset]


def _count_by_dataset(spans: Iterable[Span]) -> Counter[int]:
    """Number of samples by dataset."""
    counts: Counter[int] = Counter()
    for span in spans:
        counts[dataset_of(span.slice)] += span.samples
    return counts
