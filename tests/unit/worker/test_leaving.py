"""Joining, idling and leaving in mid-round: what the inner loop says and hands over."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hypha_ray.types import Delta, Evaluated, FragmentUpdate, Left, Merged, Plan, Ready, Report, Span
from hypha_ray.worker.incarnation import Inbox
from tests.support.worker_bench import Bench, plan_of

REPLAY = {"run": {"mode": "replay"}}


def leaving_after(batches: int, **tables: dict[str, Any]) -> Bench:
    """A worker with 8 batches to do that is told to leave after some of them."""
    bench = Bench(**tables)

    def leave(event: Any) -> None:
        if isinstance(event, Report) and len(bench.of(Report)) == batches:
            bench.leave()

    bench.on_event, bench.parts = leave, 99
    return bench.run(plan_of(64))


def test_leaving_worker_hands_over_exactly_the_batches_it_has_done() -> None:
    bench = leaving_after(3)
    assert bench.names[-3:] == ["Delta", "dict", "Left"]
    delta = bench.of(Delta)[0]
    assert (delta.samples, delta.batches, delta.spans) == (24, 3, (Span(0, 0, 0, 24),))
    assert np.array_equal(bench.weights, Bench().run(plan_of(24)).weights)


def test_leaving_worker_in_replay_mode_hands_nothing_over() -> None:
    bench = leaving_after(3, **REPLAY)
    assert bench.names[-2:] == ["Report", "Left"] and not bench.of(Delta)


def test_leaving_worker_with_its_last_batch_done_hands_over_all_of_it() -> None:
    bench = leaving_after(8)
    assert bench.of(Delta)[0].samples == 64 and bench.names[-1] == "Left"


def test_worker_told_to_leave_before_it_is_ready_says_nothing_else() -> None:
    bench = Bench()
    bench.leave()
    assert bench.run(plan_of(8)).said == [Left(bench.said[0].source)]


def test_worker_told_to_leave_while_it_evaluates_says_no_more_than_that_it_left() -> None:
    bench = Bench()
    bench.on_event = lambda event: bench.leave() if isinstance(event, Merged) else None
    assert bench.run(plan_of(16, evaluate=16)).names == ["Ready", "Merged", "Left"]


def test_worker_told_to_leave_while_it_waits_for_a_slice_hands_over_what_it_has() -> None:
    bench = Bench()
    plan = replace(plan_of(16), spans=(Span(0, 0, 0, 16), Span(0, 1, 0, 16)), keep=frozenset({0, 1}))
    reports = iter(range(2))

    def leave(event: Any) -> None:
        if isinstance(event, Report) and next(reports) == 1:
            Thread(target=bench.leave).start()  # Slice 1 never comes.

    bench.on_event, bench.parts = leave, 99
    bench.run(plan)
    assert bench.of(Delta)[0].spans == (Span(0, 0, 0, 16),) and bench.names[-1] == "Left"


def test_idle_worker_that_is_given_work_in_mid_round_does_it_and_evaluates_once() -> None:
    bench = Bench()

    def correct(event: Any) -> None:
        if isinstance(event, Evaluated):
            bench.inbox.assign(plan_of(16, version=1, evaluate=10))

    bench.on_event = correct
    bench.run(plan_of(0, evaluate=10))
    assert bench.of(Delta)[0].samples == 16 and len(bench.of(Evaluated)) == 1


def test_idle_worker_goes_on_with_the_next_round_if_that_comes_first() -> None:
    bench = Bench()

    def move_on(event: Any) -> None:
        if isinstance(event, Evaluated) and event.round == 0:
            bench.inbox.assign(plan_of(8, number=1))
            bench.inbox.merge(FragmentUpdate(1, 0), bench.theta)

    bench.on_event = move_on
    assert [delta.round for delta in bench.run(plan_of(0, evaluate=10)).of(Delta)] == [1]


class LastDesk(Inbox):
    """An inbox that calls its reader away as soon as it asks for a second round."""

    def plan(self, round_number: int) -> Plan:
        if round_number > 0:
            self.close()
        return super().plan(round_number)


def test_worker_with_its_delta_handed_over_trains_no_more_in_that_round() -> None:
    bench = Bench()
    bench.inbox, bench.parts = LastDesk(), 2
    bench.on_event = lambda event: bench.inbox.assign(plan_of(32, version=1)) if isinstance(event, dict) else None
    assert [(delta.round, delta.samples) for delta in bench.run(plan_of(16)).of(Delta)] == [(0, 16)]


ORDERS = ["feed", "blank", "plan", "merge", "restore"]


@pytest.fixture(scope="module")
def predecessor() -> Bench:
    bench = Bench(**REPLAY)
    bench.parts = 2
    return bench.run(plan_of(24))


@pytest.mark.slow
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=st.permutations(ORDERS), again=st.lists(st.sampled_from(ORDERS), max_size=4))
def test_orders_to_a_joiner_in_any_order_lead_to_the_same_bits(
    orders: list[str], again: list[str], predecessor: Bench
) -> None:
    bench = Bench(**REPLAY)
    bench.parts = 2
    plan = replace(plan_of(16, version=1, number=1), restores=True)
    actions = {
        "feed": lambda: bench.batch_source.put(0, bench.slice),
        "blank": lambda: bench.inbox.assign(plan_of(0, number=1)),
        "plan": lambda: bench.inbox.assign(plan),
        "merge": lambda: bench.inbox.merge(FragmentUpdate(1, 0), predecessor.of(dict)[0]),
        "restore": lambda: bench.inbox.restore(predecessor.of(dict)[1]),
    }

    def control() -> None:
        for order in orders + again:
            actions[order]()

    thread = Thread(target=control)
    thread.start()
    bench.work()
    thread.join(timeout=10)
    assert [type(event) for event in bench.said if not isinstance(event, Report)] == [
        *(Ready, Merged, Delta, dict, dict, str)
    ]
    weights, state = bench.of(dict)
    expected_weights, expected_state = uninterrupted()
    assert weights["parameters/float32"].tobytes() == expected_weights["parameters/float32"].tobytes()
    assert {key: array.tobytes() for key, array in state.items()} == {
        key: array.tobytes() for key, array in expected_state.items()
    }


def uninterrupted() -> list[Any]:
    """Weights and inner state of a worker that goes through both rounds itself, with its own weights as θ."""
    bench = Bench(**REPLAY)
    bench.parts = 4

    def next_round(event: Any) -> None:
        if isinstance(event, dict) and len(bench.of(dict)) == 2:
            bench.inbox.assign(plan_of(16, number=1))
            bench.inbox.merge(FragmentUpdate(1, 0), bench.of(dict)[0])

    bench.on_event = next_round
    return bench.run(plan_of(24)).of(dict)[2:]
