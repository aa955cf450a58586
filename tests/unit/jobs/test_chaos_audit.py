"""What jobs/chaos.py finds when it replays a commit log: each case has one fault, and is found by its figure."""

from __future__ import annotations

from dataclasses import replace

from chaoslab.figures.audit import account, begun_again, breaks, discarded

from hypha_ray.types import Commit, Contribution, Span

SIZES = {0: 10, 2: 6}


def commit(round: int, spans: dict[int, list[Span]], epoch: int = 0, used: dict[int, int] | None = None) -> Commit:
    return Commit(
        round=round,
        parent_sha256=None if round == 0 else f"theta-{round - 1}",
        theta_sha256=f"theta-{round}",
        outer_sha256="",
        deltas=tuple(
            Contribution(worker, 1, sum(span.samples for span in mine), 1.0) for worker, mine in spans.items()
        ),
        spans=tuple((worker, tuple(mine)) for worker, mine in spans.items()),
        cursors=used or {},
        epoch=epoch,
        ahead={},
        rejected=(),
    )


def whole_log() -> list[Commit]:
    """Three rounds: the second ends epoch 0 and begins epoch 1, which two workers share a slice in."""
    return [
        commit(0, {0: [Span(0, 0, 0, 5)], 1: [Span(0, 2, 0, 6)]}, used={0: 5, 2: 6}),
        commit(1, {0: [Span(0, 0, 5, 10), Span(1, 2, 0, 2)]}, epoch=1, used={2: 2}),
        commit(2, {0: [Span(1, 2, 4, 6)], 1: [Span(1, 2, 2, 4)]}, epoch=1, used={2: 6}),
    ]


def losses(log: list[Commit]) -> tuple[int, int, int]:
    found = account(log, SIZES)
    return found.lost, found.repeated, found.foreign


def with_spans(log: list[Commit], at: int, spans: dict[int, list[Span]]) -> list[Commit]:
    """The log with other spans in one record, and deltas to match; its own count stays."""
    changed = commit(at, spans, log[at].epoch, log[at].cursors)
    return [*log[:at], changed, *log[at + 1 :]]


def test_whole_log_has_nothing_lost_repeated_or_foreign() -> None:
    found = account(whole_log(), SIZES)
    assert (found.committed, found.whole_epochs) == (22, 1)
    assert losses(whole_log()) == (0, 0, 0)
    assert losses([]) == (0, 0, 0)


def test_sample_in_two_deltas_of_an_epoch_is_repeated() -> None:
    log = with_spans(whole_log(), 1, {0: [Span(0, 0, 4, 10), Span(1, 2, 0, 2)]})
    assert losses(log) == (0, 1, 0)


def test_sample_in_two_deltas_of_one_round_is_repeated() -> None:
    log = with_spans(whole_log(), 2, {0: [Span(1, 2, 3, 6)], 1: [Span(1, 2, 2, 4)]})
    assert losses(log) == (0, 1, 0)


def test_gap_in_a_complete_epoch_is_lost() -> None:
    log = with_spans(whole_log(), 1, {0: [Span(0, 0, 7, 10), Span(1, 2, 0, 2)]})
    assert losses(log) == (2, 0, 0)


def test_slice_that_a_complete_epoch_never_used_is_lost() -> None:
    log = with_spans(whole_log(), 0, {0: [Span(0, 0, 0, 5)]})
    assert losses(log) == (6, 0, 0)


def test_sample_that_is_counted_as_used_and_in_no_delta_is_lost() -> None:
    log = with_spans(whole_log(), 2, {0: [Span(1, 2, 4, 6)]})
    assert losses(log) == (2, 0, 0)


def test_sample_that_a_newer_epoch_counts_and_no_delta_has_is_lost() -> None:
    log = whole_log()
    log[-1] = replace(log[-1], ahead={2: {0: 3}})
    assert losses(log) == (3, 0, 0)


def test_samples_beyond_the_dataset_are_foreign() -> None:
    log = whole_log()
    log[1] = replace(log[1], spans=((0, (*log[1].spans[0][1], Span(0, 0, 10, 12), Span(0, 1, 0, 4))),))
    log[1] = replace(log[1], deltas=(replace(log[1].deltas[0], samples=13),))
    assert losses(log) == (0, 0, 6)


def test_delta_that_counts_other_samples_than_it_names_is_foreign() -> None:
    log = whole_log()
    log[0] = replace(log[0], deltas=(replace(log[0].deltas[0], samples=8), log[0].deltas[1]))
    assert losses(log) == (0, 0, 3)


def test_spans_of_a_worker_without_a_delta_are_foreign() -> None:
    log = whole_log()
    log[0] = replace(log[0], deltas=log[0].deltas[:1])
    assert losses(log) == (0, 0, 6)


def test_chain_breaks_where_a_record_is_missing_or_has_another_parent() -> None:
    log = whole_log()
    assert breaks(log) == 0
    assert breaks([log[0], log[2]]) == 1
    assert breaks(log[1:]) == 1
    assert breaks([log[0], replace(log[1], parent_sha256="other"), log[2]]) == 1
    assert breaks([log[0], replace(log[1], theta_sha256="other"), log[2]]) == 1


def test_rounds_begun_and_never_committed_are_discarded_but_not_what_follows_the_last() -> None:
    assert discarded([0, 1, 1, 2, 3], [0, 1, 2], rounds=3) == []
    assert discarded([0, 1, 2, 3], [0, 2], rounds=4) == [1, 3]
    assert begun_again([0, 1, 1, 1, 2]) == 2
