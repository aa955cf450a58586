"""The inbox: whatever order orders come in, and however often, the inner loop finds the same."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import numpy as np
import numpy.testing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_ray.codec import codec, encoder
from hypha_ray.codec.feedback import tensors
from hypha_ray.types import Flat, FragmentUpdate, Plan, Span
from hypha_ray.worker.incarnation import BatchSource, Closed, Inbox, Retired

Order = tuple[str, int, int]
"""A plan's round and version, a fragment of a round's weights, or an inner state."""

FRAGMENTS = 2
PLANS = st.tuples(st.just("assign"), st.integers(0, 3), st.integers(0, 3))
WEIGHTS = st.tuples(st.just("merge"), st.integers(0, 3), st.integers(0, FRAGMENTS - 1))
STATES = st.just(("restore", 0, 0))


def flat(number: int, fragment: int = 0) -> Flat:
    return {"parameters/float32": np.array([number, fragment], np.float32)}


def plan(number: int, version: int) -> Plan:
    return Plan(number, version, (), 4)


def put(inbox: Inbox, order: Order) -> None:
    match order:
        case ("assign", number, version):
            inbox.assign(plan(number, version))
        case ("merge", number, fragment):
            inbox.merge(FragmentUpdate(number, fragment, FRAGMENTS), flat(number, fragment))
        case _:
            inbox.restore(flat(-1))


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(orders=st.lists(PLANS | WEIGHTS | STATES, max_size=12), data=st.data())
def test_orders_repeated_and_in_any_order_end_in_the_same_state(orders: list[Order], data: st.DataObject) -> None:
    everything = [*orders, ("assign", 3, 0), *(("merge", 2, f) for f in range(FRAGMENTS)), ("restore", 0, 0)]
    again = data.draw(st.permutations(everything + data.draw(st.lists(st.sampled_from(everything), max_size=6))))
    inbox = Inbox()
    for order in again:
        put(inbox, order)
    whole = [n for n in range(4) if all(("merge", n, f) in everything for f in range(FRAGMENTS))]
    npt.assert_equal(inbox.weights(), (max(whole), True, {f: flat(max(whole), f) for f in range(FRAGMENTS)}))
    newest = max((number, version) for kind, number, version in everything if kind == "assign")
    assert inbox.plan(inbox.version or 0) == plan(*newest)
    npt.assert_equal(inbox.state(), flat(-1))
    for order in again:
        put(inbox, order)
    assert inbox.plan(inbox.version or 0) == plan(*newest) and inbox.state() is None


def reader_of(read: Callable[[], object]) -> tuple[Thread, list[object]]:
    """A thread that reads, and what it got or raised."""
    results: list[object] = []

    def body() -> None:
        try:
            results.append(read())
        except Closed as error:
            results.append(type(error))

    thread = Thread(target=body, daemon=True)
    thread.start()
    return thread, results


def test_desk_keeps_the_newest_plan_whatever_the_order() -> None:
    inbox = Inbox()
    older, newer = plan(1, 0), plan(1, 1)
    assert inbox.assign(newer) and not inbox.assign(older) and not inbox.assign(newer)
    assert inbox.plan(1) is newer


def test_desk_hands_out_weights_once_all_fragments_are_there_and_never_twice() -> None:
    inbox = Inbox()
    inbox.merge(FragmentUpdate(3, 1, of=2), flat(3, 1))
    inbox.merge(FragmentUpdate(3, 0, of=2), flat(3, 0))
    npt.assert_equal(inbox.weights(), (3, True, {0: flat(3, 0), 1: flat(3, 1)}))
    for number in (3, 4):
        for fragment in (0, 1):
            inbox.merge(FragmentUpdate(number, fragment, of=2), flat(number, fragment))
    assert inbox.weights().version == 4


def test_desk_hands_out_a_part_of_the_weights_where_that_is_all_that_comes() -> None:
    inbox = Inbox()
    inbox.merge(FragmentUpdate(0, 0), flat(0))
    inbox.weights()
    inbox.merge(FragmentUpdate(1, 2, of=1, whole=False), flat(1, 2))
    npt.assert_equal(inbox.weights(), (1, False, {2: flat(1, 2)}))


def test_parts_of_several_rounds_are_handed_out_one_after_the_other_whatever_the_order() -> None:
    inbox = Inbox()
    inbox.merge(FragmentUpdate(0, 0), flat(0))
    inbox.weights()
    inbox.merge(FragmentUpdate(2, 1, whole=False), flat(2, 1))
    thread, results = reader_of(lambda: [inbox.weights(2) for _ in range(2)])
    assert thread.is_alive() and results == []
    inbox.merge(FragmentUpdate(1, 0, whole=False), flat(1, 0))
    thread.join(timeout=10)
    npt.assert_equal(results, [[(1, False, {0: flat(1, 0)}), (2, False, {1: flat(2, 1)})]])


@pytest.mark.parametrize(("due", "taken"), [(1, [1]), (3, [2, 5]), (4, [2, 5]), (5, [5]), (None, [5])])
def test_whole_weights_replace_all_before_them_and_newer_ones_are_taken_only_for_want_of_others(
    due: int | None, taken: list[int]
) -> None:
    inbox = Inbox()
    inbox.merge(FragmentUpdate(0, 0), flat(0))
    inbox.weights()
    for number, whole in ((1, False), (2, True), (5, True)):
        inbox.merge(FragmentUpdate(number, 0, whole=whole), flat(number))
    assert [inbox.weights(due).version for _ in taken] == taken


def test_idle_worker_waits_for_a_newer_plan_of_its_round() -> None:
    inbox = Inbox()
    inbox.assign(plan(1, 0))
    thread, results = reader_of(lambda: inbox.correction(plan(1, 0)))
    inbox.assign(plan(1, 2))
    thread.join(timeout=10)
    assert results == [plan(1, 2)]


def test_idle_worker_whose_round_is_over_waits_for_the_next_plan_and_not_for_weights() -> None:
    inbox = Inbox()
    inbox.assign(plan(1, 0))
    thread, results = reader_of(lambda: inbox.correction(plan(1, 0)))
    inbox.merge(FragmentUpdate(2, 0), flat(2))
    thread.join(timeout=0.2)
    assert results == []
    inbox.assign(plan(2, 0))
    thread.join(timeout=10)
    assert results == [None]


@pytest.mark.parametrize("why", [Closed, Retired])
@pytest.mark.parametrize("wait", ["weights", "plan", "correction", "state", "batch"])
def test_every_wait_ends_when_the_worker_is_called_away(wait: str, why: type[Closed]) -> None:
    inbox, batch_source = Inbox(), BatchSource(seed=0)
    reads: dict[str, Callable[[], object]] = {
        "weights": inbox.weights,
        "plan": lambda: inbox.plan(0),
        "correction": lambda: inbox.correction(plan(0, 0)),
        "state": inbox.state,
        "batch": lambda: batch_source.batch((Span(0, 5, 0, 4),), 0, 4),
    }
    thread, results = reader_of(reads[wait])
    inbox.close(why)
    batch_source.close(why)
    thread.join(timeout=10)
    assert results == [why]


def test_called_away_reader_finds_nothing_even_if_it_is_there_and_the_first_reason_counts() -> None:
    inbox = Inbox()
    inbox.assign(plan(0, 0))
    inbox.close(Retired)
    inbox.close(Closed)
    with pytest.raises(Retired):
        inbox.plan(0)


def test_differences_are_added_to_the_weights_before_and_those_are_left_alone() -> None:
    rng, group = np.random.default_rng(0), "parameters/float32"
    steps = [{group: rng.standard_normal(5000).astype(np.float32)} for _ in range(4)]
    sender, inbox = encoder("int8", 1.0), Inbox("int8")
    inbox.merge(FragmentUpdate(0, 0), steps[0])
    (_, _, weights), taken = inbox.weights(), []
    taken.append((weights[0], weights[0][group].copy()))
    for number, step in enumerate(steps[1:], 1):
        payload, _ = sender.encode(step, None)
        for _ in range(2):
            inbox.merge(FragmentUpdate(number, 0, whole=False, difference=True), payload)
        round_number, _, weights = inbox.weights()
        taken.append((weights[0], weights[0][group].copy()))
        decoded = codec("int8").decode(tensors(payload), group, slice(0, 5000)).numpy()
        assert round_number == number and np.array_equal(taken[-1][1], taken[-2][1] + decoded)
        assert np.array_equal(taken[-2][0][group], taken[-2][1]), "somebody may still read them"
    whole = {group: np.zeros(5000, np.float32)}
    inbox.merge(FragmentUpdate(9, 0), whole)
    assert inbox.weights() == (9, True, {0: whole})
