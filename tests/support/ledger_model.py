"""A ledger beside the simplest thing that could be one: a dictionary from samples to who has them."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hypha_ray.errors import HyphaError
from hypha_ray.scheduler.ledger import Ledger
from hypha_ray.types import SliceInfo, Span, window
from tests.support.simulation_books import Sample, samples_in

USED = "used"
SEED = 5
WORKERS = range(4)


def slices_of(*samples: int) -> list[SliceInfo]:
    return [SliceInfo(index, f"slice-{index}", "0" * 64, size) for index, size in enumerate(samples)]


class Model:
    """Who has which sample; those that aren't listed are available."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes = dict(sizes)
        self.owners: dict[Sample, int | str] = {}
        self.held: dict[int, list[Sample]] = {worker: [] for worker in WORKERS}

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def available(self, epoch: int, index: int) -> int:
        return sum((epoch, index, number) not in self.owners for number in range(self.sizes[index]))

    def is_used(self, epoch: int) -> bool:
        return self.counts()[epoch].total() == self.total

    def counts(self) -> dict[int, Counter[int]]:
        """Used samples of each epoch and slice."""
        newest = max((epoch for epoch, _, _ in self.owners), default=0)
        found: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(newest + 2)}
        for (epoch, index, _), owner in self.owners.items():
            if owner == USED:
                found[epoch][index] += 1
        return found

    def rank(self, epoch: int, index: int, worker: int) -> int:
        """0: untouched; 1: no other worker has a part; 2: another one has."""
        owners = {self.owners.get((epoch, index, number)) for number in range(self.sizes[index])}
        if owners == {None}:
            return 0
        return 2 if owners - {None, USED, worker} else 1


class Books:
    """Does everything to a ledger and to the model, and compares them after each step."""

    def __init__(self, cls: type[Ledger], *samples: int) -> None:
        self.slices = slices_of(*samples)
        self.ledger = cls(self.slices, SEED)
        self.model = Model({info.index: info.samples for info in self.slices})

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def assign(self, worker: int, samples: int, cached: Collection[int] = ()) -> None:
        model = self.model
        near = {*cached, *(index for _, index, _ in model.held[worker])}
        foreseen = None if near else self.ledger.upcoming(samples)
        ranks = {
            (epoch, index): model.rank(epoch, index, worker) for epoch in self._open_epochs() for index in model.sizes
        }
        spans = self.ledger.assign(worker, samples, cached)
        given = samples_in(spans)
        assert len(given) == len(set(given)) == samples, "the number of samples is wrong"
        assert not set(given) & model.owners.keys(), "a sample was given that isn't available"
        assert all(0 <= number < model.sizes[index] for _, index, number in given), "there is no such sample"
        model.owners.update(dict.fromkeys(given, worker))
        model.held[worker] += given
        self._compare_choice(spans, near, ranks)
        assert foreseen in (None, tuple(dict.fromkeys(span.slice for span in spans))), "upcoming was wrong"
        self.compare()

    def release(self, worker: int, keep: int = 0) -> None:
        """Release all but a worker's first `keep` samples."""
        self.ledger.release(worker, window(tuple(self.ledger.held.get(worker, ())), 0, keep))
        self._free(worker, keep)
        self.compare()

    def commit(self, deltas: Mapping[int, Sequence[Span]]) -> None:
        self.ledger.commit(deltas)
        for worker, spans in deltas.items():
            used = set(samples_in(spans))
            self.model.owners.update(dict.fromkeys(used, USED))
            self.model.held[worker] = [sample for sample in self.model.held[worker] if sample not in used]
        self.compare()

    def refuse(self, deltas: Mapping[int, Sequence[Span]]) -> None:
        """Commit something impossible."""
        try:
            self.ledger.commit(deltas)
        except HyphaError:
            self.compare()
        else:
            raise AssertionError(f"{deltas} was committed")

    def restart(self, worker: int, samples: int) -> None:
        """Go on with a ledger restored from what was written down; it decides as the old one would have."""
        for one in WORKERS:
            self.release(one)
        state = json.loads(json.dumps(self.ledger.state()))
        old, self.ledger = copy.deepcopy(self.ledger), self.ledger.restore(self.slices, SEED, state)
        self.compare()
        expected = old.assign(worker, samples)
        self.assign(worker, samples)
        assert tuple(self.ledger.held.get(worker, ())) == expected, "a restored ledger decides otherwise"

    def drain(self) -> None:
        """Without faults every open epoch is soon used up: an action for each sample is more than enough."""
        goal = max((epoch for epoch, _, _ in self.model.owners), default=0)
        left = (goal + 1) * self.model.total - self.model.counts()[goal].total()
        for worker in WORKERS:
            self.commit({worker: tuple(self.ledger.held.get(worker, ()))})
        for action in range(left):
            if self.ledger.epoch > goal:
                break
            worker = action % len(WORKERS)
            self.assign(worker, 1 + action % 3)
            self.commit({worker: tuple(self.ledger.held.get(worker, ()))})
        assert self.ledger.epoch > goal, "the epoch is never used up"

    # ── comparisons ───────────────────────────────────────────────────────────────────────────────────────────────

    def compare(self) -> None:
        ledger, model = self.ledger, self.model
        ledger.check()
        for worker in WORKERS:
            assert samples_in(tuple(ledger.held.get(worker, ()))) == model.held[worker], "a worker has other samples"
        counts = model.counts()
        oldest = next(epoch for epoch in range(len(counts) + 1) if counts.get(epoch, Counter()).total() < model.total)
        assert ledger.epoch == oldest, "another epoch is the oldest"
        assert ledger.cursors() == dict(counts.get(oldest, {})), "the cursors are wrong"
        newer = {epoch: dict(count) for epoch, count in counts.items() if epoch > oldest and count}
        assert ledger.ahead() == newer, "the cursors ahead are wrong"

    def _compare_choice(
        self, spans: Sequence[Span], near: Collection[int], ranks: Mapping[tuple[int, int], int]
    ) -> None:
        """Were there better samples to give?"""
        model = self.model
        newest = max((span.epoch for span in spans), default=0)
        for epoch in range(self.ledger.epoch, newest):
            assert not any(model.available(epoch, index) for index in model.sizes), "an epoch was begun too early"
        left = [index for index in model.sizes if model.available(newest, index)]
        far = [span.slice for span in spans if span.epoch == newest and span.slice not in near]
        if far:
            assert not set(left) & set(near), "a slice that the worker has was passed over"
            worst = max(ranks.get((newest, index), 0) for index in far)
            assert all(ranks.get((newest, index), 0) >= worst for index in left), "a better slice was passed over"

    def _open_epochs(self) -> range:
        return range(self.ledger.epoch, len(self.model.counts()))

    def _free(self, worker: int, keep: int) -> None:
        for sample in self.model.held[worker][keep:]:
            del self.model.owners[sample]
        del self.model.held[worker][keep:]


class Walker:
    """Takes random steps, the likelier ones more often, and then drains.

    `step` tells how far it came.
    """

    STEPS = 40

    def __init__(self, cls: type[Ledger], seed: int) -> None:
        self._dice = random.Random(seed)
        self._books = Books(cls, *(self._dice.randint(1, 8) for _ in range(self._dice.randint(1, 6))))
        self.step = 0

    def walk(self) -> None:
        moves = [self._assign, self._commit, self._release, self._release_tail, self._refuse, self._restart]
        for _ in range(self.STEPS):
            self.step += 1
            self._dice.choices(moves, [8, 6, 2, 2, 2, 1])[0]()
        self.step += 1
        self._books.drain()

    def _worker(self) -> int:
        return self._dice.choice(WORKERS)

    def _assign(self) -> None:
        indices = list(self._books.model.sizes)
        cached = self._dice.sample(indices, self._dice.randint(0, len(indices))) if self._dice.random() < 0.5 else ()
        self._books.assign(self._worker(), self._dice.randint(0, 12), cached)

    def _part(self, worker: int) -> tuple[Span, ...]:
        """Some of a worker's samples, mostly the first ones, as a delta would have them."""
        held = tuple(self._books.ledger.held.get(worker, ()))
        size = sum(span.samples for span in held)
        start = self._dice.randint(0, size) if self._dice.random() < 0.2 else 0
        return window(held, start, self._dice.randint(start, size))

    def _commit(self) -> None:
        workers = self._dice.sample(WORKERS, self._dice.randint(1, len(WORKERS)))
        self._books.commit({worker: self._part(worker) for worker in workers})
        if self._dice.random() < 0.5:
            for worker in WORKERS:
                self._books.release(worker)

    def _release(self) -> None:
        self._books.release(self._worker())

    def _release_tail(self) -> None:
        self._books.release(self._worker(), keep=self._dice.randint(0, 10))

    def _refuse(self) -> None:
        """Commit a delta with a defect, beside a good one."""
        good, worker = self._dice.sample(WORKERS, 2)
        part = self._part(worker)
        index, size = self._dice.choice(list(self._books.model.sizes.items()))
        epoch = self._books.ledger.epoch + self._dice.randint(-1, 1)
        foreign = tuple(self._books.ledger.held.get(good, ())) or (Span(epoch, index, 0, size + 1),)
        defects = [
            (*part, *part[-1:]) if part else foreign,
            (*part, self._dice.choice(foreign)),
            (*part, Span(epoch, index, size - 1, size + 1)),
            (*part, Span(epoch, index, 1, 0)),
            (*part, Span(epoch, max(self._books.model.sizes) + 1, 0, 1)),
        ]
        self._books.refuse({good: self._part(good), worker: self._dice.choice(defects)})

    def _restart(self) -> None:
        self._books.restart(self._worker(), self._dice.randint(1, 12))
