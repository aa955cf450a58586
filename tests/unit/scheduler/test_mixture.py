"""Mixtures of datasets in the ledger and in a simulated fleet: shares, epochs, losses, and resumption."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hypha_ray.scheduler import worker_plans
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.scheduler.mixture import Mixture
from hypha_ray.types import SLICES_PER_DATASET, SliceInfo, Span, dataset_of
from tests.support.fleet import Faults, Fleet, done, job_of, past_of, rounds, used
from tests.support.mutants_mixture import MUTANTS, mutant

SIZES = ([100, 60, 40], [30, 20])
NEW: dict[str, Any] = {"epoch": 0, "used": []}


def slices() -> list[SliceInfo]:
    return [
        SliceInfo(number * SLICES_PER_DATASET + index, f"{index}", "", samples)
        for number, sizes in enumerate(SIZES)
        for index, samples in enumerate(sizes)
    ]


def mixture(
    weights: Sequence[float], used: dict[str, Any] = NEW, shares: dict[str, list[int]] | None = None
) -> Mixture:
    return Mixture(slices(), weights, 7, None, used, shares or {})


def samples(spans: Iterable[Span]) -> list[tuple[int, int, int]]:
    return [(span.epoch, span.slice, number) for span in spans for number in range(span.start, span.stop)]


def batches(spans: Iterable[Span], size: int) -> list[list[tuple[int, int, int]]]:
    every = samples(spans)
    return [every[start : start + size] for start in range(0, len(every), size)]


def shares(part: Iterable[tuple[int, int, int]]) -> Counter[int]:
    return Counter(dataset_of(index) for _, index, _ in part)


@pytest.mark.parametrize("weights", [(0.8, 0.2), (3.0, 1.0), (1.0, 2.0)])
@pytest.mark.parametrize("size", [1, 5, 8])
def test_every_batch_has_the_shares_and_their_sum_is_exact_to_a_sample(weights: tuple[float, ...], size: int) -> None:
    spans = mixture(weights).assign(0, 30 * size, (), size)
    exact = [weight / sum(weights) for weight in weights]
    total: Counter[int] = Counter()
    for number, batch in enumerate(batches(spans, size), start=1):
        found = shares(batch)
        total.update(found)
        assert len(batch) == size
        for dataset, weight in enumerate(exact):
            assert abs(found[dataset] - weight * size) < 1 + 1e-9
            assert abs(total[dataset] - weight * size * number) < 0.5 + 1e-9, "not the nearest number"


def test_each_dataset_has_epochs_of_its_own_in_which_every_sample_is_once() -> None:
    book = mixture((0.5, 0.5))
    given = samples(span for _ in range(20) for span in book.assign(0, 20, (), 4))
    assert max(Counter(given).values()) == 1
    for dataset, sizes in enumerate(SIZES):
        own = [one for one in given if dataset_of(one[1]) == dataset]
        assert len(own) == 200
        whole = 200 // sum(sizes)
        assert Counter(epoch for epoch, _, _ in own) == {epoch: sum(sizes) for epoch in range(whole)}


@pytest.mark.slow
def test_walk_with_losses_and_resumptions_keeps_shares_and_uses_every_sample_once() -> None:
    for seed in range(20):
        draws = random.Random(seed)
        weights = [draws.uniform(0.2, 1.0), draws.uniform(0.2, 1.0)]
        book, taken = mixture(weights), Counter[tuple[int, int, int]]()
        by_worker: dict[int, Counter[int]] = {worker: Counter() for worker in range(3)}
        for _ in range(60):
            worker, batch = draws.randrange(3), draws.choice((4, 8))
            spans = book.assign(worker, batch * draws.randrange(1, 4), (), batch)
            match draws.randrange(4):
                case 0:
                    book.release(worker)
                case 1:  # A leaver hands over what it has done.
                    part = samples(spans)[:batch]
                    done = [Span(epoch, index, number, number + 1) for epoch, index, number in part]
                    book.commit({worker: done})
                    book.release(worker)
                    taken.update(part)
                    by_worker[worker].update(shares(part))
                case 2:
                    held = book.held(worker)
                    book.commit({worker: held})
                    taken.update(samples(held))
                    by_worker[worker].update(shares(samples(held)))
                case _:
                    for other in range(3):
                        book.release(other)
                    state = {
                        "epoch": book.epoch,
                        "used": [[epoch, index, n, n + 1] for epoch, index, n in taken if epoch >= book.epoch],
                    }
                    book = mixture(weights, state, book.shares())
            book.check()
        assert max(taken.values()) == 1
        for counts in by_worker.values():
            total = sum(counts.values())
            for dataset, weight in enumerate(weights):
                assert abs(counts[dataset] - weight / sum(weights) * total) <= 8, "one batch"
        assert {book.epoch: book.cursors(), **book.ahead()} == cursors_of(taken)


def cursors_of(taken: Counter[tuple[int, int, int]]) -> dict[int, dict[int, int]]:
    """Used samples of each slice by epoch, from the first one that isn't complete; no later one that a dataset has."""
    counts: dict[int, Counter[int]] = {}
    for epoch, index, _ in taken:
        counts.setdefault(epoch, Counter())[index] += 1
    complete = []
    for dataset, sizes in enumerate(SIZES):
        own = [shares((0, index, 0) for index in counts.get(e, Counter()).elements())[dataset] for e in range(99)]
        complete.append(next(epoch for epoch, count in enumerate(own) if count < sum(sizes)))
    first = min(complete)
    found = {
        epoch: {i: count for i, count in sorted(part.items()) if epoch == first or complete[dataset_of(i)] <= epoch}
        for epoch, part in sorted(counts.items())
        if epoch >= first
    }
    return {first: {}} | {epoch: part for epoch, part in found.items() if part}


def test_samples_assigned_one_by_one_have_the_shares_with_and_without_commits_and_resumptions() -> None:
    for committed, resumed in ((False, False), (True, False), (True, True)):
        book, taken = mixture((0.8, 0.2)), list[tuple[int, int, int]]()
        for number in range(1, 51):
            spans = book.assign(0, 1, (), 1)
            taken += samples(spans)
            assert abs(shares(taken)[0] - 0.8 * number) <= 0.5 + 1e-9
            if committed:
                book.commit({0: spans})
            if resumed:
                used = [[epoch, index, n, n + 1] for epoch, index, n in taken if epoch >= book.epoch]
                book = mixture((0.8, 0.2), {"epoch": book.epoch, "used": used}, book.shares())


def test_released_samples_of_all_datasets_are_given_to_the_next_worker() -> None:
    book = mixture((0.5, 0.5))
    first = samples(book.assign(0, 20, (), 4))
    book.release(0)
    assert book.held(0) == () and sorted(samples(book.assign(1, 20, (), 4))) == sorted(first)


def test_run_resumed_with_other_weights_makes_up_for_its_shares_batch_by_batch() -> None:
    book = mixture((0.1, 0.9), NEW, {"0": [80, 20]})
    for batch in batches(book.assign(0, 40, (), 8), 8):
        assert shares(batch) == {1: 8}, "a batch has more or fewer samples than asked for"


def test_slices_to_be_fed_ahead_are_of_all_datasets() -> None:
    upcoming = mixture((0.5, 0.5)).upcoming(100)
    assert {dataset_of(index) for index in upcoming} == {0, 1}
    assert len(upcoming) == len(set(upcoming))


def test_numbers_of_datasets_do_not_overlap() -> None:
    assert dataset_of(SLICES_PER_DATASET - 1) == 0 and dataset_of(SLICES_PER_DATASET) == 1
    assert {dataset_of(replace(info).index) for info in slices()} == {0, 1}


# ── in a fleet ────────────────────────────────────────────────────────────────────────────────────────────────────────

MIX = {"mix": [{"path": "stories", "weight": 0.8}, {"path": "code", "weight": 0.2}]}
SYNC: dict[str, dict[str, Any]] = {
    "diloco": {},
    "overlap": {"fragments": 2, "delay_steps": 2, "mixing": 0.5},
    "async": {"strategy": "async"},
    "sync": {"strategy": "sync"},
}


def mixed_fleet(sync: dict[str, Any], update_rounds: int, past: ResumePoint | None = None) -> Fleet:
    tables = {"rounds": rounds(update_rounds, 240, 8), "sync": sync, "dataset": MIX}
    files = [
        SliceInfo(number * SLICES_PER_DATASET + index, f"{index}", "0" * 64, 100, split)
        for number, count in enumerate((12, 5))
        for index, split in enumerate(["train"] * count + ["validation"])
    ]
    return Fleet(job_of(**tables), [0.1, 0.2, 0.15], files, Faults(), past)


def by_worker(fleets: Sequence[Fleet]) -> dict[int, Counter[int]]:
    found: dict[int, Counter[int]] = {}
    for fleet in fleets:
        for persist in fleet.persisted:
            for worker, spans in persist.spans:
                found.setdefault(worker, Counter()).update(shares(samples(spans)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sync", SYNC.values(), ids=SYNC)
def test_shares_are_exact_to_one_batch_through_five_kills_and_a_resumption(sync: dict[str, Any]) -> None:
    first = mixed_fleet(sync, 60)
    for number in range(5):
        first.later(3.0 + 5 * number, lambda number=number: first.kill(number % 3))  # type: ignore[misc]
    done(first)
    second = done(mixed_fleet(sync, 100, past_of(first.persisted)))
    assert first.noted("loss") and second.persisted[-1].round == 99
    total: Counter[int] = Counter()
    for counts in by_worker([first, second]).values():
        total.update(counts)
        assert abs(counts[0] - 0.8 * sum(counts.values())) <= 8
    assert abs(total[0] - 0.8 * sum(total.values())) <= 8
    both = used(first) + used(second)
    assert set(both.values()) == {1}
    for dataset, count in enumerate((1200, 500)):
        epochs = Counter(epoch for epoch, index, _ in both if dataset_of(index) == dataset)
        assert all(epochs[epoch] == count for epoch in range(max(epochs))), "an epoch is complete before the next"


# ── defects ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def scenarios() -> Iterator[tuple[str, Callable[[], None]]]:
    """Tests of this file by name, the fast ones first."""
    for weights in ((0.8, 0.2), (3.0, 1.0)):
        yield (
            f"shares of {weights}",
            partial(test_every_batch_has_the_shares_and_their_sum_is_exact_to_a_sample, weights, 5),
        )
    yield "epochs", test_each_dataset_has_epochs_of_its_own_in_which_every_sample_is_once
    yield "one by one", test_samples_assigned_one_by_one_have_the_shares_with_and_without_commits_and_resumptions
    yield "release", test_released_samples_of_all_datasets_are_given_to_the_next_worker
    yield "other weights", test_run_resumed_with_other_weights_makes_up_for_its_shares_batch_by_batch
    yield "slices ahead", test_slices_to_be_fed_ahead_are_of_all_datasets
    yield "walk", test_walk_with_losses_and_resumptions_keeps_shares_and_uses_every_sample_once
    for name, sync in SYNC.items():
        yield name, partial(test_shares_are_exact_to_one_batch_through_five_kills_and_a_resumption, sync)


@pytest.mark.parametrize("name", MUTANTS)
def test_defect_of_the_mixture_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defective = mutant(name)
    monkeypatch.setitem(globals(), "Mixture", defective)
    monkeypatch.setattr(worker_plans, "Mixture", defective)
    assert any(fails(name, scenario) for scenario in scenarios()), f"nobody noticed: {name}"


def fails(name: str, scenario: tuple[str, Callable[[], None]]) -> bool:
    try:
        scenario[1]()
    except Exception as failure:
        print(f"{name}: {scenario[0]}, {type(failure).__name__}")
        return True
    return False
