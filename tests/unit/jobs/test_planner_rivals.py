"""The benchmark of the planner beside simpler rules: rivals by hand, and the clairvoyant as a bound."""

from __future__ import annotations

import pytest
from benchmarks.scheduling.planner_rivals import FixedSteps, Projection, Start, clairvoyant
from benchmarks.scheduling.unsteady_fleet import MESSAGE_S, Conditions, Machine, UnsteadyFleet


class Steady(Machine):
    """A machine whose batches all take the same time."""

    def __init__(self, batch_s: float) -> None:
        self._batch_s = batch_s

    def seconds(self, batch: int, at: float) -> float:
        """Time of any batch."""
        return self._batch_s


def start_of(*batch_s: float, target: int) -> Start:
    """A round's start with steady machines."""
    return Start([Steady(seconds) for seconds in batch_s], 5.0, (0,) * len(batch_s), target)


def test_clairvoyant_takes_batches_in_the_order_of_their_ends() -> None:
    assert clairvoyant(start_of(1.0, 3.0, target=4)) == pytest.approx(3.0 + 2 * MESSAGE_S)
    assert clairvoyant(start_of(1.0, 3.0, target=5)) == pytest.approx(4.0 + 2 * MESSAGE_S)


def test_fixed_steps_wait_for_the_slowest() -> None:
    assert FixedSteps()(start_of(1.0, 3.0, target=4)) == pytest.approx(6.0 + 2 * MESSAGE_S)


def test_projection_of_steady_machines_is_as_good_as_clairvoyance() -> None:
    rule = Projection()
    start = start_of(1.0, 3.0, target=8)
    rule(start)
    assert rule(start) == pytest.approx(clairvoyant(start))


@pytest.mark.parametrize("conditions", [Conditions(), Conditions(noise=0.3, drift=0.2, stragglers=0.05)])
def test_no_round_of_the_scheduler_is_shorter_than_the_clairvoyants(conditions: Conditions) -> None:
    machines = [Machine(3, number, conditions) for number in range(4)]
    fleet = UnsteadyFleet(machines, batches=10, rounds=4).run()
    assert len(fleet.finished_rounds) == 4
    for timing in fleet.finished_rounds:
        start = Start(machines, timing.began_at + MESSAGE_S, timing.done, 40)
        assert timing.ended_at - timing.began_at >= clairvoyant(start) - 1e-9


def test_scheduler_is_within_a_hundredth_of_the_clairvoyant_with_exact_times() -> None:
    machines = [Machine(5, number, Conditions()) for number in range(8)]
    fleet = UnsteadyFleet(machines, batches=20, rounds=4).run()
    for timing in fleet.finished_rounds[2:]:
        start = Start(machines, timing.began_at + MESSAGE_S, timing.done, 160)
        assert timing.ended_at - timing.began_at <= 1.01 * clairvoyant(start)
