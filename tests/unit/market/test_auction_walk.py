"""Random walks of runs that obey the auction, each at its own pace, while it dies and machines come."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hypha_ray.market.allotment import Allotment, Holding, Order, Ruling, Standing
from hypha_ray.market.auction import Attendance
from hypha_ray.market.requirements import Need, NodeResources
from tests.support.auction_model import AuctionModel, Bidder
from tests.unit.market.nodes import node

ATTEND_S = 2.0
SETTLED = 40
"""Turns of every run after which nothing may change any more."""


@dataclass
class Run:
    """A run as it behaves: leases by name, on nodes; those in `going` hand over their deltas."""

    name: str
    bid: float
    wanted: int
    least: int
    begun: bool = False
    works: bool = False
    quota: int = 0
    leases: dict[str, tuple[int, float]] = field(default_factory=dict)
    going: set[str] = field(default_factory=set)

    @property
    def staying(self) -> int:
        return len(self.leases) - len(self.going)

    def obey(self, ruling: Ruling) -> None:
        """Take a ruling in, as a scheduler does."""
        self.quota = ruling.quota
        self.going |= ruling.leave.keys() & self.leases.keys()
        if self.works and not self.begun and ruling.quota < self.least:
            self.works, self.leases, self.going = False, {}, set()
        elif not self.works and ruling.quota >= self.least:
            self.works = True


class Walk(RuleBasedStateMachine):
    """Runs, their leases and the auction."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.sizes, self.runs = 0.0, list[int](), dict[str, Run]()
        self.attendance = Attendance(0.0)
        self.started = 0

    @initialize(order=st.sampled_from(["bid", "fair"]), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def open(self, order: Order, sizes: list[int]) -> None:
        self.order, self.sizes = order, sizes

    def free(self) -> list[int]:
        taken = Counter(place for run in self.runs.values() for place, _ in run.leases.values())
        return [size - taken[place] for place, size in enumerate(self.sizes)]

    def nodes(self) -> list[NodeResources]:
        return [node(f"n{i}", self.sizes[i], free=room) for i, room in enumerate(self.free())]

    def rulings(self) -> dict[str, Ruling]:
        held = {
            run.name: [Holding(name, f"n{at}", {"CPU": 1.0}, since) for name, (at, since) in run.leases.items()]
            for run in self.runs.values()
        }
        return Allotment(self.nodes(), self.attendance.standings, held, self.order).rulings()

    def turn(self, run: Run) -> None:
        self.now += ATTEND_S / max(1, len(self.runs))
        needs = (Need("worker", 1.0),) * run.wanted
        self.attendance.record(Standing(run.name, run.bid, needs, run.least, run.begun), self.now)
        ruling = self.rulings()[run.name]
        stays = len(run.leases) - len(ruling.leave.keys() & run.leases.keys())
        if run.begun:
            assert stays >= min(len(run.leases), run.least), "a run that trains keeps what it needs"
        run.obey(ruling)

    def lease(self, run: Run) -> None:
        """One lease more, if Ray has room and the quota isn't reached; machines are taken by whichever run is first."""
        free = self.free()
        if run.works and len(run.leases) < run.quota and any(free):
            self.now += 0.01
            name = next(name for i in range(9) if (name := f"worker-{i}") not in run.leases)
            run.leases[name] = free.index(max(free)), self.now

    @precondition(lambda self: len(self.runs) < 4)
    @rule(bid=st.sampled_from([0, 5, 10, 10.5, 20]), wanted=st.integers(1, 4), data=st.data())
    def start(self, bid: float, wanted: int, data: st.DataObject) -> None:
        self.started += 1
        name = f"run-{self.started}"
        self.runs[name] = Run(name, bid, wanted, data.draw(st.integers(1, wanted)))

    def drawn(self, data: Any) -> Run:
        run: Run = data.draw(st.sampled_from(list(self.runs.values())))
        return run

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def attend(self, data: st.DataObject) -> None:
        self.turn(self.drawn(data))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def take_machine(self, data: st.DataObject) -> None:
        self.lease(self.drawn(data))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        run = self.drawn(data)
        for name in run.going:
            del run.leases[name]
        run.going = set()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        run = self.drawn(data)
        run.begun |= run.works and run.staying >= run.least

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        del self.runs[self.drawn(data).name]
        self.attendance.forget_all_but(self.runs)

    @precondition(lambda self: len(self.sizes) < 5)
    @rule(size=st.integers(1, 3))
    def add_node(self, size: int) -> None:
        self.sizes.append(size)

    @rule()
    def auction_dies(self) -> None:
        self.attendance = Attendance(self.now)

    @invariant()
    def no_machine_has_more_than_fits(self) -> None:
        assert min(self.free(), default=0) >= 0

    @invariant()
    def a_run_that_trains_has_what_it_needs(self) -> None:
        assert all(run.staying >= run.least for run in self.runs.values() if run.begun)

    def teardown(self) -> None:
        """Once nothing comes and goes, runs come to rest as the model says: with their least workers, or with none."""
        for _ in range(SETTLED if self.sizes else 0):
            for run in self.runs.values():
                self.turn(run)
                for name in run.going:
                    del run.leases[name]
                run.going = set()
                for _ in range(run.wanted):
                    self.lease(run)
        for run in self.runs.values():
            assert (run.works and run.staying >= run.least) or not run.leases
        came = [self.runs[one.run] for one in self.attendance.standings]
        bidders = [Bidder(one.name, one.bid, one.wanted, one.least, one.begun, len(one.leases)) for one in came]
        expected = AuctionModel(bidders, sum(self.free()), self.order == "fair" if self.sizes else False).expected()
        assert expected == {run.name: (len(run.leases), 0) for run in self.runs.values()}


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
