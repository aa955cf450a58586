"""The ledger, case by case."""

from __future__ import annotations

import json

import pytest

from hypha_ray.scheduler.ledger import Ledger, LedgerError
from hypha_ray.types import SliceInfo, Span, window
from tests.support.ledger_model import SEED, WORKERS, slices_of
from tests.support.simulation_books import samples_in

A, B, C = 0, 1, 2


def ledger_of(*samples: int, seed: int = SEED) -> Ledger:
    return Ledger(slices_of(*samples), seed)


def slices_in(spans: tuple[Span, ...]) -> list[int]:
    return [span.slice for span in spans]


def whole(ledger: Ledger, worker: int, cached: set[int] | None = None, samples: int = 10) -> int:
    """Assign as much as one slice; it has to be one."""
    (span,) = ledger.assign(worker, samples, cached or ())
    assert (span.start, span.stop) == (0, samples)
    return span.slice


def order(ledger: Ledger, slices: int, samples: int = 10) -> list[int]:
    """The epoch's order of slices, found by using it up."""
    found = [whole(ledger, A, samples=samples) for _ in range(slices)]
    ledger.commit({A: tuple(ledger.held.get(A, ()))})
    return found


# ── assign ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_assign_gives_whole_slices_in_few_spans() -> None:
    spans = ledger_of(*[10] * 20).assign(A, 95)
    assert [span.samples for span in spans] == [10] * 9 + [5]
    assert len(set(slices_in(spans))) == 10


def test_assign_nothing_gives_nothing() -> None:
    assert ledger_of(10).assign(A, 0) == ()


def test_assign_second_part_goes_on_where_the_first_ended() -> None:
    ledger = ledger_of(*[10] * 5)
    (first,) = ledger.assign(A, 4)
    (second,) = ledger.assign(A, 6)
    assert (second.slice, second.start, second.stop) == (first.slice, 4, 10)
    assert tuple(ledger.held.get(A, ())) == (first, second)


def test_assign_prefers_cached_slices() -> None:
    spans = ledger_of(*[10] * 50).assign(A, 45, cached={3, 14, 15, 92})
    assert set(slices_in(spans)[:3]) == {3, 14, 15} and len(spans) == 5


def test_assign_prefers_what_is_near_after_what_is_cached_and_before_all_else() -> None:
    """Of near slices, too, those come first of which no other worker holds a part."""
    ledger, near = ledger_of(*[10] * 50), frozenset({1, 2, 3, 4, 92})
    (shared,) = ledger.assign(B, 3, nearby_slices=near)
    assert shared.slice in near
    spans = ledger.assign(A, 60, cached={30}, nearby_slices=near)
    assert slices_in(spans)[0] == 30 and set(slices_in(spans)[1:4]) == {1, 2, 3, 4} - {shared.slice}
    assert slices_in(spans)[4] == shared.slice and not set(slices_in(spans)[5:]) & near
    ledger.commit({A: spans, B: (shared,)})
    rest = ledger.assign(C, 437, nearby_slices=near)
    assert {span.epoch for span in rest} == {0} and not set(slices_in(rest)) & near
    (newer,) = ledger.assign(B, 3, nearby_slices=near)
    assert newer.epoch == 1 and newer.slice in near
    ledger.check()


def test_assign_takes_untouched_slices_before_leftovers_before_shared_ones() -> None:
    ledger = ledger_of(*[10] * 4)
    (left,) = ledger.assign(A, 4)
    ledger.commit({A: (left,)})
    (shared,) = ledger.assign(B, 4)
    others = set(range(4)) - {left.slice, shared.slice}
    spans = ledger.assign(C, 32)
    assert set(slices_in(spans)[:2]) == others
    assert slices_in(spans)[2:] == [left.slice, shared.slice]


def test_assign_splits_the_last_slices_of_an_epoch_between_workers() -> None:
    ledger = ledger_of(10)
    spans = [ledger.assign(worker, 3)[0] for worker in (A, B, C)]
    assert [(span.start, span.stop) for span in spans] == [(0, 3), (3, 6), (6, 9)]


def test_assign_more_than_the_dataset_goes_through_several_epochs() -> None:
    spans = ledger_of(3, 4).assign(A, 7 * 3 + 2)
    samples = samples_in(spans)
    assert len(samples) == len(set(samples)) == 23
    assert [sum(epoch == number for epoch, _, _ in samples) for number in range(4)] == [7, 7, 7, 2]
    assert [span.epoch for span in spans] == sorted(span.epoch for span in spans)


def test_assign_begins_an_epoch_when_the_last_has_nothing_available_even_if_unfinished() -> None:
    ledger = ledger_of(10)
    ledger.assign(A, 10)
    assert ledger.assign(B, 4) == (Span(1, 0, 0, 4),)
    ledger.release(A)
    assert ledger.assign(B, 4) == (Span(0, 0, 0, 4),)


def test_order_of_slices_is_another_one_in_every_epoch_and_for_every_seed() -> None:
    ledger = ledger_of(*[10] * 30)
    orders = [order(ledger, 30), order(ledger, 30), order(ledger_of(*[10] * 30, seed=SEED + 1), 30)]
    assert all(sorted(found) == list(range(30)) for found in orders)
    assert len({tuple(found) for found in orders}) == 3


def test_order_of_slices_is_that_of_the_seed_however_they_are_listed() -> None:
    listed = slices_of(*[10] * 30)
    assert order(Ledger(listed, 1), 30) == order(Ledger(listed[::-1], 1), 30)


def test_order_of_cached_slices_is_shuffled_too() -> None:
    ledger, cached = ledger_of(*[10] * 30), set(range(30))
    first = [whole(ledger, A, cached) for _ in range(30)]
    second = [whole(ledger, A, cached) for _ in range(30)]
    assert sorted(first) == sorted(second) == list(range(30)) and first != second != sorted(second)


def test_slices_keep_their_own_numbers() -> None:
    ledger = Ledger([SliceInfo(7, "a", "", 5), SliceInfo(3, "b", "", 6)], SEED)
    assert {span.slice: span.samples for span in ledger.assign(A, 11)} == {7: 5, 3: 6}


@pytest.mark.parametrize("slices", [[], slices_of(4, 0), slices_of(4) * 2], ids=["none", "empty", "twice"])
def test_ledger_of_impossible_slices_is_an_error(slices: list[SliceInfo]) -> None:
    with pytest.raises(LedgerError):
        Ledger(slices, SEED)


# ── the reference's tracker cases, for seven slices, as far as they make sense here ───────────────────────────────────


def test_two_workers_in_turn_share_an_epoch_and_keep_to_their_slices_in_the_next() -> None:
    ledger = ledger_of(*[10] * 7)
    first = [whole(ledger, worker) for worker in (A, B, A, B, A, B, A)]
    assert sorted(first) == list(range(7))
    ledger.commit({worker: tuple(ledger.held.get(worker, ())) for worker in (A, B)})
    assert ledger.epoch == 1
    cached = {A: set(first[::2]), B: set(first[1::2])}
    assert all(whole(ledger, worker, cached[worker]) in cached[worker] for worker in (B, A, B, A, B, A, A))


def test_fast_worker_takes_more_and_the_slow_one_takes_over_what_nobody_has_begun() -> None:
    ledger = ledger_of(*[10] * 7)
    order_of: dict[int, list[int]] = {A: [], B: []}
    for worker in (A, A, A, B, A, A, A):
        order_of[worker].append(whole(ledger, worker))
    ledger.commit({worker: tuple(ledger.held.get(worker, ())) for worker in (A, B)})
    fast, slow = set(order_of[A]), set(order_of[B])
    assert whole(ledger, B, slow) in slow
    begun = {whole(ledger, A, fast) for _ in range(3)}
    taken_over = whole(ledger, B, slow)
    assert taken_over in fast - begun
    assert {whole(ledger, A, fast) for _ in range(2)} == fast - begun - {taken_over}


def test_slice_of_a_removed_worker_that_was_not_committed_comes_back() -> None:
    ledger = ledger_of(*[10] * 7)
    given = [whole(ledger, worker) for worker in (A, B, A, B, A, B, A)]
    ledger.commit({A: tuple(ledger.held.get(A, ()))[:-1], B: tuple(ledger.held.get(B, ()))})
    ledger.release(A)
    assert tuple(ledger.held.get(A, ())) == ()
    assert whole(ledger, C) == given[-1]
    assert ledger.assign(C, 1)[0].epoch == 1


# ── release, commit ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_release_of_a_tail_keeps_the_head_and_makes_the_others_available() -> None:
    ledger = ledger_of(*[10] * 3)
    spans = ledger.assign(A, 25)
    ledger.release(A, kept_spans=window(spans, 0, 12))
    assert tuple(ledger.held.get(A, ())) == window(spans, 0, 12)
    assert set(samples_in(ledger.assign(B, 18))) == {
        (0, index, number) for index in range(3) for number in range(10)
    } - set(samples_in(tuple(ledger.held.get(A, ()))))


def test_release_of_nothing_changes_nothing() -> None:
    ledger = ledger_of(10)
    spans = ledger.assign(A, 4)
    ledger.release(A, kept_spans=spans)
    ledger.release(B)
    assert (tuple(ledger.held.get(A, ())), tuple(ledger.held.get(B, ()))) == (spans, ())


def test_release_of_everything_leaves_no_trace() -> None:
    ledger, fresh = ledger_of(*[10] * 6), ledger_of(*[10] * 6)
    for worker in WORKERS:
        ledger.assign(worker, 13)
    for worker in WORKERS:
        ledger.release(worker)
    assert ledger.assign(A, 45) == fresh.assign(A, 45)


def test_commit_of_a_part_leaves_the_rest_assigned_until_it_is_released() -> None:
    ledger = ledger_of(10)
    (span,) = ledger.assign(A, 10)
    ledger.commit({A: (Span(0, span.slice, 0, 4),)})
    assert tuple(ledger.held.get(A, ())) == (Span(0, 0, 4, 10),)
    assert ledger.cursors() == {0: 4}
    ledger.release(A)
    assert ledger.assign(B, 6) == (Span(0, 0, 4, 10),)


def test_commit_span_over_two_assignments_is_taken() -> None:
    ledger = ledger_of(10)
    ledger.assign(A, 4)
    ledger.assign(A, 4)
    ledger.commit({A: (Span(0, 0, 2, 7),)})
    assert tuple(ledger.held.get(A, ())) == (Span(0, 0, 0, 2), Span(0, 0, 7, 8))


def test_commit_of_all_samples_closes_the_epoch() -> None:
    ledger = ledger_of(10, 5)
    ledger.assign(A, 15)
    ledger.commit({A: tuple(ledger.held.get(A, ()))})
    assert (ledger.epoch, ledger.cursors(), ledger.ahead()) == (1, {}, {})


def test_commit_of_a_newer_epoch_is_counted_ahead_until_the_older_one_is_used() -> None:
    ledger = ledger_of(10)
    ledger.assign(A, 10)
    ledger.assign(B, 10)
    ledger.assign(C, 3)
    ledger.commit({B: tuple(ledger.held.get(B, ())), C: tuple(ledger.held.get(C, ()))})
    assert (ledger.epoch, ledger.cursors(), ledger.ahead()) == (0, {}, {1: {0: 10}, 2: {0: 3}})
    ledger.commit({A: tuple(ledger.held.get(A, ()))})
    assert (ledger.epoch, ledger.cursors(), ledger.ahead()) == (2, {0: 3}, {})


@pytest.mark.parametrize(
    "spans",
    [
        (Span(0, 0, 0, 3), Span(0, 0, 0, 3)),
        (Span(0, 0, 0, 3), Span(0, 0, 2, 4)),
        (Span(0, 0, 2, 5),),
        (Span(0, 0, 4, 6),),
        (Span(0, 0, 6, 12),),
        (Span(1, 0, 0, 3),),
        (Span(0, 9, 0, 3),),
        (Span(0, 0, 2, 2),),
        (Span(0, 0, 3, 2),),
        (Span(0, 0, -1, 2),),
    ],
    ids=["twice", "overlap", "partly", "foreign", "beyond", "epoch", "slice", "empty", "backwards", "negative"],
)
def test_commit_of_samples_that_are_not_the_workers_is_an_error_without_effect(spans: tuple[Span, ...]) -> None:
    ledger = ledger_of(10)
    ledger.assign(A, 4)
    ledger.assign(B, 4)
    with pytest.raises(LedgerError, match="worker 0"):
        ledger.commit({B: tuple(ledger.held.get(B, ())), A: spans})
    assert (tuple(ledger.held.get(A, ())), tuple(ledger.held.get(B, ()))) == ((Span(0, 0, 0, 4),), (Span(0, 0, 4, 8),))
    assert ledger.cursors() == {}
    ledger.check()


def test_commit_of_the_same_delta_again_is_an_error() -> None:
    ledger = ledger_of(10)
    spans = ledger.assign(A, 4)
    ledger.commit({A: spans})
    with pytest.raises(LedgerError):
        ledger.commit({A: spans})
    assert ledger.cursors() == {0: 4}


# ── state, restore, upcoming ──────────────────────────────────────────────────────────────────────────────────────────


def used_here_and_there() -> Ledger:
    ledger = ledger_of(10, 8, 6)
    for worker, samples in ((A, 9), (B, 13), (C, 11)):
        ledger.assign(worker, samples)
    ledger.commit({A: tuple(ledger.held.get(A, ())), C: window(tuple(ledger.held.get(C, ())), 2, 9)})
    return ledger


def test_restore_of_a_state_goes_on_as_the_released_ledger_does() -> None:
    ledger = used_here_and_there()
    state = json.loads(json.dumps(ledger.state()))
    restored = Ledger.restore(slices_of(10, 8, 6), SEED, state)
    for worker in WORKERS:
        ledger.release(worker)
    assert restored.state() == state == ledger.state()
    assert (restored.epoch, restored.cursors(), restored.ahead()) == (ledger.epoch, ledger.cursors(), ledger.ahead())
    assert sum(stop - start for _, _, start, stop in state["used"]) == 9 + 7
    assert [restored.assign(A, 20), restored.assign(B, 20)] == [ledger.assign(A, 20), ledger.assign(B, 20)]


def test_restore_from_the_spans_of_all_commits_is_the_same() -> None:
    ledger = ledger_of(10, 8, 6)
    commits: list[tuple[Span, ...]] = []
    for samples in (7, 22, 5, 9):
        commits.append(ledger.assign(A, samples))
        ledger.commit({A: commits[-1]})
    used = [[span.epoch, span.slice, span.start, span.stop] for spans in commits for span in spans]
    assert Ledger.restore(slices_of(10, 8, 6), SEED, {"epoch": 0, "used": used}).state() == ledger.state()
    assert ledger.epoch == 1


@pytest.mark.parametrize(
    "used",
    [[[1, 0, 2, 5], [1, 0, 4, 6]], [[1, 0, 8, 11]], [[1, 0, -1, 2]], [[1, 0, 5, 4]], [[1, 7, 0, 1]], [[0, 0, 0, 1]]],
    ids=["twice", "beyond", "negative", "backwards", "slice", "closed"],
)
def test_restore_of_an_impossible_state_is_an_error(used: list[list[int]]) -> None:
    with pytest.raises(LedgerError):
        Ledger.restore(slices_of(10), SEED, {"epoch": 1, "used": used})


def test_upcoming_foretells_what_a_worker_without_slices_gets() -> None:
    ledger = used_here_and_there()
    for samples in (1, 4, 30, 200):
        foreseen = ledger.upcoming(samples)
        given = ledger.assign(3, samples)
        assert foreseen == tuple(dict.fromkeys(slices_in(given)))
        ledger.release(3)


def test_check_finds_a_defect() -> None:
    ledger = used_here_and_there()
    ledger.check()
    ledger.held[A].append(Span(0, 0, 0, 1))
    with pytest.raises(LedgerError):
        ledger.check()
