"""Machines that a run with a goal has, keeps and lets go."""

from __future__ import annotations

import math
from typing import Any

from hypha_ray.market.goal import Machine, Standing, decide

HOUR_S = 3600.0


def machines(spot: int = 0, firm: int = 0, held: int = 0, held_firm: int = 0) -> list[Machine]:
    """Machines of one sample a second, at 0.3 an hour, or 1.0 if they are on demand."""
    listed = [Machine(0.3, False, 1.0, worker) for worker in range(held)]
    listed += [Machine(1.0, True, 1.0, held + worker) for worker in range(held_firm)]
    listed += [Machine(0.3, False, 1.0) for _ in range(spot)]
    return listed + [Machine(1.0, True, 1.0) for _ in range(firm)]


def standing(hours_left: float, machine_hours: float, offered: list[Machine], **more: Any) -> Standing:
    """A run with four slots, and work for so many hours of one machine."""
    fields: dict[str, Any] = {"money_left": math.inf, "least": 1, "most": 4, "start_s": 60.0, "round_s": 600.0}
    fields["spot_price"] = 0.3
    samples = round(machine_hours * HOUR_S)
    return Standing(hours_left * HOUR_S, samples_left=samples, machines=offered, **fields | more)


def test_run_with_time_to_spare_waits_for_spot_machines() -> None:
    decision = decide(standing(12, 40, machines(spot=2, firm=4)))
    assert (decision.wanted, decision.max_price, decision.is_patient) == (2, 0.3, True)
    assert decision.spare_s == 2 * HOUR_S


def test_run_without_spot_machines_keeps_its_least_workers_on_demand() -> None:
    decision = decide(standing(12, 40, machines(firm=4)))
    assert (decision.wanted, decision.max_price) == (1, 1.0)


def test_run_at_its_last_safe_moment_fills_all_slots() -> None:
    decision = decide(standing(10.3, 40, machines(held=2, firm=4)))
    assert (decision.wanted, decision.drop, decision.is_patient) == (4, (), False)


def test_run_within_its_margin_hires_on_demand_alone() -> None:
    decision = decide(standing(10.05, 40, machines(held=2, spot=2, firm=4)))
    assert (decision.wanted, decision.firm_only, decision.max_price) == (4, True, 1.0)


def test_deadline_that_no_fleet_can_keep_is_told() -> None:
    decision = decide(standing(9, 40, machines(held_firm=4)))
    assert decision.spare_s == -1 * HOUR_S
    assert decision.end_s == 10 * HOUR_S


def test_spot_machine_takes_the_place_of_a_dearer_one_between_rounds() -> None:
    offered = machines(held=3, held_firm=1, spot=1, firm=3)
    before = standing(10.8, 40, offered, was_patient=False)
    assert decide(before).drop == (3,)
    assert decide(standing(10.8, 40, offered, was_patient=False, may_drop=False)).drop == ()


def test_another_machine_of_the_same_price_changes_nothing() -> None:
    slower = [Machine(0.3, False, 0.8, 0), *machines(spot=4)]
    assert decide(standing(40, 40, slower, most=1)).drop == ()


def test_without_a_spot_market_the_cheapest_machines_all_work() -> None:
    decision = decide(standing(100, 40, machines(firm=4), spot_price=math.inf))
    assert decision.wanted == 4


def test_budget_keeps_dear_machines_out() -> None:
    affordable = decide(standing(math.inf, 40, machines(spot=2, firm=2), money_left=40 * 0.4, spot_price=math.inf))
    assert (affordable.wanted, affordable.max_price) == (2, 0.3)
    generous = decide(standing(13.5, 40, machines(spot=2, firm=2), money_left=40 * 0.75, spot_price=math.inf))
    assert (generous.wanted, generous.max_price) == (4, 1.0)


def test_budget_wins_over_the_deadline() -> None:
    decision = decide(standing(10, 40, machines(spot=2, firm=4), money_left=40 * 0.35))
    assert decision.wanted == 2
    assert decision.spare_s == -10 * HOUR_S
