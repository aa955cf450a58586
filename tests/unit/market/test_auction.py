"""Room of a cluster among runs that compete for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from hypha_ray.market import allotment
from hypha_ray.market.allotment import OUTBID, Allotment, Holding, NodeOffers, Order, Ruling, Standing
from hypha_ray.market.auction import CHECK_S, SILENT_S, TTL_S, Attendance
from hypha_ray.market.leases import LeaseRequest, Offer, Refusal, answers
from hypha_ray.market.requirements import Need, NodeResources
from tests.support.auction_model import AuctionModel, Bidder
from tests.support.mutants_auction import MUTANTS, mutant
from tests.unit.market.nodes import node

ONE = Need("worker", 1)


def standing(run: str, bid: float, wanted: int, least: int = 1, cpu: float = 1) -> Standing:
    return Standing(run, bid, (Need("worker", cpu),) * wanted, least)


def holding(name: str, on: str, since_s: float = 0.0, cpu: float = 1) -> Holding:
    return Holding(name, on, {"CPU": cpu}, since_s)


def rulings(nodes: list[NodeResources], *runs: Standing, order: Order = "bid", **held: Any) -> dict[str, Ruling]:
    return Allotment(nodes, runs, held, order).rulings()


def quotas(nodes: list[NodeResources], *runs: Standing, order: Order = "bid", **held: Any) -> dict[str, int]:
    return {run: ruling.quota for run, ruling in rulings(nodes, *runs, order=order, **held).items()}


def test_run_alone_may_have_all_that_it_wants_and_finds() -> None:
    assert quotas([node("a", 2), node("b", 1)], standing("x", 1, wanted=5)) == {"x": 3}
    assert quotas([node("a", 2), node("b", 1)], standing("x", 1, wanted=2)) == {"x": 2}


def test_higher_bid_is_served_first_and_of_equal_bids_the_first_to_come() -> None:
    three = [node("a", 3)]
    assert quotas(three, standing("x", 10, 3, least=3), standing("y", 20, 3, least=3)) == {"x": 0, "y": 3}
    assert quotas(three, standing("x", 10, 3, least=3), standing("y", 10, 3, least=3)) == {"x": 3, "y": 0}


def test_gang_is_admitted_whole_or_not_at_all() -> None:
    assert quotas([node("a", 3)], standing("x", 10, 5, least=4)) == {"x": 0}


def test_lower_bid_does_not_pass_a_run_that_waits_for_its_gang() -> None:
    assert quotas([node("a", 3)], standing("small", 10, 1), standing("large", 20, 5, least=5)) == {
        "small": 0,
        "large": 0,
    }
    assert quotas([node("a", 3)], standing("small", 30, 1), standing("large", 20, 5, least=5)) == {
        "small": 1,
        "large": 0,
    }


def test_outbid_run_hands_back_its_latest_leases_down_to_its_least() -> None:
    nodes = [node(name, free=0) for name in "abc"]
    held = [holding("worker-0", "a", 5), holding("worker-1", "b", 7), holding("worker-2", "c", 6)]
    found = rulings(nodes, standing("x", 10, 3), standing("y", 20, 3), x=held)
    assert found["y"].quota == 2 and found["x"].quota == 1
    assert found["x"].leave == dict.fromkeys(["worker-1", "worker-2"], "y bids 20, and this run 10")
    assert found["y"].leave == {}


def test_bid_that_is_hardly_higher_takes_nothing_away() -> None:
    nodes, held = [node("a", free=0)], [holding("worker-0", "a")]
    low = standing("x", 10, 1, least=0)
    assert quotas(nodes, low, standing("y", 10.9, 1), x=held) == {"x": 1, "y": 0}
    assert quotas(nodes, low, standing("y", 10 * OUTBID, 1), x=held) == {"x": 0, "y": 1}


def test_nothing_is_taken_away_in_vain() -> None:
    nodes, held = [node("a", 2, free=0)], [holding("worker-0", "a"), holding("worker-1", "a", 1)]
    found = rulings(nodes, standing("x", 10, 2), standing("y", 20, 3, least=3), x=held)
    assert found == {"x": Ruling(2), "y": Ruling(0)}
    found = rulings(nodes, standing("x", 10, 2), standing("y", 20, 1, cpu=2), x=held)
    assert found == {"x": Ruling(2), "y": Ruling(0)}


def test_several_small_leases_on_one_node_make_room_for_a_large_one() -> None:
    nodes = [node("a", 1, free=0), node("b", 2, free=0)]
    held = [
        holding("worker-0", "a", 0),
        holding("worker-1", "b", 1),
        holding("worker-2", "b", 2),
        holding("worker-3", "a", 3),
    ]
    found = rulings(nodes, standing("x", 10, 4), standing("y", 20, 1, cpu=2), x=held)
    assert set(found["x"].leave) == {"worker-1", "worker-2"} and found["y"].quota == 1


def test_owner_that_refuses_a_bid_gives_no_room_to_it() -> None:
    nodes = [node("a", floor=15), node("b", price=12), node("c", accepts="server"), node("d")]
    assert quotas(nodes, standing("x", 10, 4), standing("y", 20, 1)) == {"x": 1, "y": 1}


def test_fair_share_grows_runs_in_the_ratio_of_their_bids() -> None:
    runs = standing("x", 10, 9), standing("y", 20, 9)
    assert quotas([node("a", 9)], *runs) == {"x": 1, "y": 8}
    assert quotas([node("a", 9)], *runs, order="fair") == {"x": 3, "y": 6}


def test_fair_share_takes_back_what_another_run_has_beyond_its_own() -> None:
    nodes, held = [node("a", 9, free=0)], [holding(f"worker-{i}", "a", i) for i in range(9)]
    high, low = standing("y", 20, 9), standing("x", 10, 9)
    for rich, poor, expected in ((low, high, {"x": 3, "y": 6}), (high, low, {"x": 3, "y": 6})):
        found = rulings(nodes, rich, poor, order="fair", **{rich.run: held})
        assert {run: ruling.quota for run, ruling in found.items()} == expected
        assert list(found[rich.run].leave) == [f"worker-{i}" for i in range(8, expected[rich.run] - 1, -1)]


def scene(seed: int) -> tuple[list[NodeResources], list[Bidder], dict[str, list[int]], Order]:
    """Nodes, runs, the node of each of their leases, and an order."""
    dice = Random(seed)
    free = [dice.randint(1, 3) for _ in range(dice.randint(1, 4))]
    sizes, bidders, places = list(free), list[Bidder](), dict[str, list[int]]()
    for run in "xyz"[: dice.randint(1, 3)]:
        wanted = dice.randint(1, 5)
        places[run] = []
        for _ in range(dice.randint(0, wanted)):
            if any(free):
                places[run].append(dice.choice([index for index, room in enumerate(free) if room]))
                free[places[run][-1]] -= 1
        bid, least = dice.choice([0, 1, 10, 10.5, 20]), dice.randint(0, wanted)
        bidders.append(Bidder(run, bid, wanted, least, dice.random() < 0.5, len(places[run])))
    order: Order = dice.choice(["bid", "fair"])
    return [node(f"n{i}", size, free=free[i]) for i, size in enumerate(sizes)], bidders, places, order


def examine(module: Any, seed: int) -> None:
    """Hold rulings against the model, which counts; and look at which leases go."""
    nodes, bidders, places, order = scene(seed)
    runs = [module.Standing(one.run, one.bid, (ONE,) * one.wanted, one.least, one.begun) for one in bidders]
    held = {
        run: [module.Holding(f"worker-{i}", f"n{place}", {"CPU": 1.0}, i) for i, place in enumerate(at)]
        for run, at in places.items()
    }
    found = module.Allotment(nodes, runs, held, order).rulings()
    expected = AuctionModel(bidders, round(sum(one.free["CPU"] for one in nodes)), order == "fair").expected()
    assert {run: (ruling.quota, len(ruling.leave)) for run, ruling in found.items()} == expected
    for one in bidders:
        latest = [f"worker-{i}" for i in range(one.held)][one.kept :]
        assert set(found[one.run].leave) == set(latest)
    room = Counter({one.id: one.free["CPU"] for one in nodes})
    room.update(f"n{at}" for run, all_at in places.items() for at in all_at[len(all_at) - len(found[run].leave) :])
    assert sum(found[one.run].quota - one.kept for one in bidders) <= sum(room.values())
    for ruling in found.values():
        assert sum((ruling.needs or {}).values()) == ruling.quota


@pytest.mark.parametrize("part", range(4))
def test_rulings_are_those_of_a_model_that_only_counts(part: int) -> None:
    for seed in range(part * 500, (part + 1) * 500):
        examine(allotment, seed)


@pytest.mark.parametrize("name", MUTANTS)
def test_defect_of_the_rulings_shows_among_random_runs(name: str) -> None:
    defective = mutant(name)
    for seed in range(2000):
        try:
            examine(defective, seed)
        except Exception:
            return
    raise AssertionError("no scene shows it")


GPU, CORES = Need("worker", 1, 1), Need("worker", 4)


def two_kinds(**held: Any) -> dict[str, Ruling]:
    """Rulings on a run of two workers with a GPU and two with four cores; a GPU is free, no four cores are."""
    nodes = [NodeResources("g", {"CPU": 4.0, "GPU": 2.0}, Counter({"CPU": 3.0, "GPU": 1.0})), node("c", 8, free=0)]
    return rulings(nodes, Standing("x", 10, (GPU, GPU, CORES, CORES), 4), **held)


def test_lost_worker_of_the_first_kind_is_granted_although_the_last_kind_has_no_room() -> None:
    held = [Holding("worker-1", "g", GPU.bundle(), 1), *(holding(f"worker-{i}", "c", i, 4) for i in (2, 3))]
    assert two_kinds(x=held)["x"] == Ruling(4)
    assert two_kinds(x=held)["x"].needs == {GPU: 2, CORES: 2}


def test_lost_worker_of_the_last_kind_is_not_granted_the_room_of_the_first_one() -> None:
    held = [*(Holding(f"worker-{i}", "g", GPU.bundle(), i) for i in (0, 1)), holding("worker-2", "c", 2, 4)]
    ruling = two_kinds(x=held)["x"]
    assert ruling.quota == 3
    assert ruling.needs == {GPU: 2, CORES: 1}


def test_kind_that_has_room_is_granted_while_an_earlier_one_waits() -> None:
    nodes = [NodeResources("g", {"CPU": 4.0, "GPU": 2.0}, Counter({"CPU": 3.0})), node("c", 8)]
    found = rulings(nodes, Standing("x", 10, (GPU, CORES, CORES), 1))["x"]
    assert found.needs == {GPU: 0, CORES: 2}


def test_numbers_say_which_workers_hold_leases_if_others_dial_in() -> None:
    """Workers 0 and 1 dial in, 2 needs a GPU, and 3 four cores: it is 2 that is missing."""
    nodes = [NodeResources("g", {"CPU": 4.0, "GPU": 1.0}, Counter({"CPU": 4.0, "GPU": 1.0})), node("c", 4, free=0)]
    run = Standing("x", 10, (GPU, CORES), 2, numbers=(2, 3))
    assert rulings(nodes, run, x=[holding("worker-3", "c", 3, 4)])["x"].needs == {GPU: 1, CORES: 1}


def test_run_is_behind_another_one_only_while_that_waits_for_its_least() -> None:
    three = [node("a", 3)]
    found = rulings(three, standing("x", 10, 3, least=3), standing("y", 20, 4, least=4))
    assert (found["x"].behind, found["y"].behind) == ("y", None)
    found = rulings(three, standing("x", 10, 3, least=3), standing("y", 20, 3, least=3))
    assert (found["x"].quota, found["x"].behind) == (0, None)


def test_latest_of_leases_that_are_as_old_is_the_one_of_the_highest_number() -> None:
    nodes, held = [node("a", 11, free=0)], [holding(f"worker-{i}", "a") for i in range(11)]
    found = rulings(nodes, standing("x", 10, 11), standing("y", 20, 1), x=held)
    assert set(found["x"].leave) == {"worker-10"}


def test_machines_of_one_kind_are_asked_once_for_each_need_whatever_the_runs_are() -> None:
    asked: list[tuple[Need, int]] = []

    def ask(request: LeaseRequest, nodes: Sequence[NodeResources]) -> list[Offer | Refusal]:
        asked.append((request.need, len(nodes)))
        return answers(request, nodes)

    machines = NodeOffers([node(f"n{i}") for i in range(500)] + [node(f"m{i}", price=3) for i in range(500)], ask)
    assert [machines.free_offer(need, bid) is not None for bid in range(50) for need in (ONE, GPU)] == [
        True,
        False,
    ] * 50
    assert asked == [(ONE, 2), (GPU, 2)]


def test_run_that_has_yet_to_begin_gives_way_as_a_whole() -> None:
    nodes, held = [node("a", 3, free=0)], [holding(f"worker-{i}", "a", i) for i in range(3)]
    high = standing("y", 20, 3, least=3)
    low = standing("x", 10, 3, least=3)
    assert quotas(nodes, low, high, x=held) == {"x": 3, "y": 0}
    found = rulings(nodes, replace(low, begun=False), high, x=held)
    assert found["y"] == Ruling(3)
    assert found["x"] == Ruling(0, dict.fromkeys(["worker-0", "worker-1", "worker-2"], "y bids 20, and this run 10"))
    assert quotas(nodes, replace(low, begun=False), replace(high, bid=10.5), x=held) == {"x": 3, "y": 0}


def test_run_that_has_yet_to_begin_first_gives_what_it_can_spare() -> None:
    nodes, held = [node("a", 3, free=0)], [holding(f"worker-{i}", "a", i) for i in range(3)]
    found = rulings(nodes, replace(standing("x", 10, 3), begun=False), standing("y", 20, 2), x=held)
    assert (found["x"].quota, set(found["x"].leave), found["y"].quota) == (1, {"worker-1", "worker-2"}, 2)


def test_gang_is_not_taken_in_vain() -> None:
    nodes, held = [node("a", 2, free=0)], [holding("worker-0", "a"), holding("worker-1", "a", 1)]
    low = replace(standing("x", 10, 2, least=2), begun=False)
    assert rulings(nodes, low, standing("y", 20, 3, least=3), x=held) == {"x": Ruling(2), "y": Ruling(0)}


def test_runs_are_listed_as_they_came_and_with_their_latest_standing() -> None:
    runs = Attendance(0.0)
    for one in (standing("x", 1, 1), standing("y", 2, 1), standing("x", 3, 2)):
        runs.record(one, 0.0)
    assert runs.standings == [standing("x", 3, 2), standing("y", 2, 1)]
    runs.forget_all_but({"y", "z"})
    assert runs.standings == [standing("y", 2, 1)]
    assert runs.check(CHECK_S) == []


def checked(runs: Attendance, now: float, speaking: Collection[str] = ()) -> list[str]:
    for run in speaking:
        runs.record(standing(run, 1, 1), now)
    return runs.check(now)


def test_silent_run_is_forgotten_and_later_loses_its_leases_once() -> None:
    runs, over = Attendance(0.0), list[tuple[float, list[str]]]()
    runs.record(standing("x", 1, 1), 0.0)
    for now in range(5, 100, 5):
        if found := checked(runs, now, "y"):
            over.append((now, found))
        assert {one.run for one in runs.standings} == ({"x", "y"} if now <= SILENT_S else {"y"})
    assert over == [(TTL_S + CHECK_S, ["x"])]


@pytest.mark.parametrize(("settings", "lost_s"), [({}, TTL_S + CHECK_S), ({"ttl_s": 20.0}, 25.0)])
def test_last_run_of_all_loses_its_leases_too(settings: dict[str, float], lost_s: float) -> None:
    runs = Attendance(0.0, **settings)  # type: ignore[arg-type]
    runs.record(standing("x", 1, 1), 0.0)
    assert [now for now in range(5, 100, 5) if checked(runs, now)] == [lost_s]


def test_hung_run_loses_its_leases_even_if_the_auction_is_a_new_one() -> None:
    """It has heard of the run by its leases alone; a run that speaks isn't meant."""
    runs = Attendance(0.0, {"hung", "fine"})
    assert [(now, found) for now in range(5, 100, 5) if (found := checked(runs, now, ["fine"]))] == [
        (TTL_S + CHECK_S, ["hung"])
    ]


def test_silence_while_the_auction_itself_was_stopped_does_not_count() -> None:
    runs = Attendance(0.0)
    for run in "xy":
        runs.record(standing(run, 1, 1), 0.0)
    assert checked(runs, 1000.0, "y") == []
    assert [one.run for one in runs.standings] == ["x", "y"]
    assert [checked(runs, 1000.0 + late, "y") for late in (5.0, 10.0)] == [[], []]
    assert [one.run for one in runs.standings] == ["y"]
