"""Account of every sample: available, assigned to one worker, or used by a committed delta.

                assign                  commit
    AVAILABLE ─────────► ASSIGNED ─────────────► USED
        ▲                    │
        └────────────────────┘
               release

Slices are shuffled anew in each epoch; a new epoch is begun when the one before has no AVAILABLE sample. The next
assignment depends only on the present holders of samples. So a ledger restored from its used samples continues as the
original one would after releasing all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, count
from typing import Any

from hypha_ray.scheduler.epoch import Epoch, LedgerError, by_slice, without
from hypha_ray.types import SliceInfo, Span, samples_of

__all__ = ["Ledger", "LedgerError"]


class Ledger:
    """Account of the samples of all epochs.

    Args:
        slices: the train slices.
        seed: seed of the order of slices, which is shuffled in every epoch.
        most_samples: samples that a worker may be given at once; None: any number.
        epochs: epochs after which no samples are left; None: there is always another one.

    """

    def __init__(
        self, slices: Sequence[SliceInfo], seed: int, most_samples: int | None = None, epochs: int | None = None
    ) -> None:
        self._sizes = {info.index: info.samples for info in slices}
        if not self._sizes or len(self._sizes) < len(slices) or min(self._sizes.values()) < 1:
            raise LedgerError("LED001", "there are no slices, or one is empty or listed twice")
        self._seed = seed
        self._most = most_samples
        self._limit = epochs
        self._epoch_samples = sum(self._sizes.values())
        self._oldest = 0
        self._epochs: dict[int, Epoch] = {}
        self.held: dict[int, list[Span]] = {}
        """Samples that each worker holds."""

    @classmethod
    def restore(
        cls,
        slices: Sequence[SliceInfo],
        seed: int,
        state: Mapping[str, Any],
        most_samples: int | None = None,
        epochs: int | None = None,
    ) -> Ledger:
        """Restore a ledger from its `state`; all samples that aren't used are available.

        The last commit's epoch with the spans of all commits since that epoch is a valid state, too.

        Raises:
            LedgerError: the state doesn't fit the slices.

        """
        ledger = cls(slices, seed, most_samples, epochs)
        ledger._oldest = state["epoch"]
        used_spans = by_slice(Span(*fields) for fields in state["used"])
        for (number, index), spans in used_spans.items():
            if number < ledger._oldest or index not in ledger._sizes:
                raise LedgerError("LED002", "the state doesn't fit the slices", str(spans[0]))
            ledger._epoch(number).restore(index, spans)
        ledger._close_epochs()
        return ledger

    def state(self) -> dict[str, Any]:
        """State for `restore`, as plain JSON: the oldest epoch, and the used samples as epoch, slice, start, stop."""
        used_spans: list[Span] = []
        for epoch in self._epochs.values():
            for spans in epoch.used.values():
                used_spans.extend(spans)
        return {"epoch": self._oldest, "used": [list(span) for span in sorted(used_spans)]}

    # ── the life of a sample ──────────────────────────────────────────────────────────────────────────────────────

    def assign(
        self,
        worker: int,
        samples: int,
        cached: Collection[int] = (),
        batch: int = 1,
        nearby_slices: AbstractSet[int] = frozenset(),
    ) -> tuple[Span, ...]:
        """Give `samples` samples to a worker, of the oldest epochs that have some; fewer once the last epoch has none.

        All batches are alike here.

        In each epoch, slices that the worker has or is being sent come first, and untouched ones second. Rests of
        slices without a holder follow, and slices that other workers hold a part of come last. All `nearby_slices`
        come in that order before any others.

        Raises:
            LedgerError: more samples than a worker is given at once.

        """
        if self._most is not None and samples > self._most:
            raise LedgerError("LED005", f"too much for worker {worker}", f"{samples} samples", f"up to {self._most}")
        assigned = self.held.setdefault(worker, [])
        present_slices = {*cached, *(span.slice for span in assigned)}
        spans: list[Span] = []
        for number in self._epochs_to_come():
            if samples <= 0:
                break
            epoch_spans = self._epoch(number).assign(samples, present_slices, nearby_slices)
            samples -= samples_of(epoch_spans)
            spans += epoch_spans
        assigned += spans
        return tuple(spans)

    def release(self, worker: int, kept_spans: Sequence[Span] = ()) -> None:
        """Make all samples of a worker available again, except those to keep."""
        released = _unused(worker, self.held.pop(worker, []), kept_spans)
        if kept_spans:
            self.held[worker] = list(kept_spans)
        for span in released:
            self._epochs[span.epoch].give_back(span)

    def commit(self, deltas: Mapping[int, Sequence[Span]]) -> None:
        """Mark the samples of workers' deltas as used; their other samples stay assigned.

        Raises:
            LedgerError: a sample isn't assigned to the worker, or is listed twice; nothing is changed then.

        """
        unused = {worker: _unused(worker, self.held.get(worker, []), spans) for worker, spans in deltas.items()}
        for worker, spans in deltas.items():
            self.held[worker] = unused[worker]
            for span in spans:
                self._epochs[span.epoch].use(span)
        self._close_epochs()

    def _epochs_to_come(self) -> Iterable[int]:
        """Numbers of the epochs that may have available samples, oldest first."""
        if self._limit is None:
            return count(self._oldest)
        return range(self._oldest, self._limit)

    def _epoch(self, epoch_number: int) -> Epoch:
        if epoch_number not in self._epochs:
            self._epochs[epoch_number] = Epoch(epoch_number, self._sizes, self._seed)
        return self._epochs[epoch_number]

    def _close_epochs(self) -> None:
        while self._oldest in self._epochs and not self._epochs[self._oldest].unused:
            del self._epochs[self._oldest]
            self._oldest += 1

    # ── what the books say ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def sizes(self) -> Mapping[int, int]:
        """Samples of each slice."""
        return self._sizes

    @property
    def epoch(self) -> int:
        """The oldest epoch that isn't wholly used."""
        return self._oldest

    @property
    def unused(self) -> int:
        """Samples that no commit has used, up to the last epoch; the ledger must have a last one."""
        return self._total(lambda epoch: epoch.unused)

    @property
    def available(self) -> int:
        """Samples that are neither assigned nor used, up to the last epoch; the ledger must have a last one."""
        return self._total(lambda epoch: epoch.available)

    @property
    def assigned(self) -> int:
        """Samples that workers hold."""
        return sum(epoch.unused - epoch.available for epoch in self._epochs.values())

    def _total(self, samples_in: Callable[[Epoch], int]) -> int:
        """Sum over the epochs to come, of which untouched ones count whole."""
        assert self._limit is not None
        total = max(0, self._limit - self._oldest) * self._epoch_samples
        for epoch_number, epoch in self._epochs.items():
            if epoch_number < self._limit:
                total += samples_in(epoch) - self._epoch_samples
        return total

    def cursors(self) -> dict[int, int]:
        """Used samples of each slice in the oldest epoch, zeros left out."""
        return self._epochs[self._oldest].cursors() if self._oldest in self._epochs else {}

    def ahead(self) -> dict[int, dict[int, int]]:
        """Used samples of each slice in newer epochs, zeros left out."""
        cursors: dict[int, dict[int, int]] = {}
        for epoch_number, epoch in sorted(self._epochs.items()):
            if epoch_number > self._oldest and epoch.used:
                cursors[epoch_number] = epoch.cursors()
        return cursors

    def upcoming(self, samples: int) -> tuple[int, ...]:
        """Slices from which the next `samples` samples will probably be assigned, in order."""
        slices: dict[int, None] = {}
        for epoch_number in self._epochs_to_come():
            if samples <= 0 or len(slices) == len(self._sizes):
                break
            for index, available_samples in self._epoch(epoch_number).next_slices(samples):
                slices[index] = None
                samples -= available_samples
        return tuple(slices)

    def check(self) -> None:
        """Check that every sample is in exactly one state, and that every available one will be assigned.

        Raises:
            LedgerError: the ledger has a defect.

        """
        assigned = by_slice(chain.from_iterable(self.held.values()))
        by_epoch: dict[int, dict[int, list[Span]]] = {epoch_number: {} for epoch_number in self._epochs}
        for (epoch_number, index), spans in assigned.items():
            if epoch_number not in by_epoch:
                raise LedgerError("LED004", "samples of a closed epoch are assigned", str(sorted(assigned)))
            by_epoch[epoch_number][index] = spans
        for epoch_number, epoch in self._epochs.items():
            epoch.check(by_epoch[epoch_number])


def _unused(worker: int, assigned: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Samples of a worker that its delta leaves assigned."""
    if assigned == [*spans]:  # Most deltas have all samples of their plan.
        return []
    cuts = by_slice(sorted(spans))
    unused: list[Span] = []
    for span in assigned:
        unused += without(span, cuts.get((span.epoch, span.slice), ()))
    # Overlapping or foreign spans remove less than they have samples.
    if any(span.samples < 1 for span in spans) or samples_of(assigned) - samples_of(unused) != samples_of(spans):
        raise LedgerError("LED003", f"the delta of worker {worker} has samples that aren't its own, or has some twice")
    return unused
