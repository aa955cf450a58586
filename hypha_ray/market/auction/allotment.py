"""Allotment of a cluster's room: how many workers each of several competing runs may hold.

    standings of runs, Ray's table of leases, nodes ──► allot ──► for each run: a quota, and leases to hand back

It never leases anything: Ray's table of placement groups is the only account of what is taken, and a run makes its own
groups. So nothing is granted twice, and a new auction knows all once the runs have spoken again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from hypha_ray.market.auction.machines import NodeOffer, NodeOffers
from hypha_ray.market.requirements import Need, NodeResources

Order: TypeAlias = Literal["bid", "fair"]
Grant: TypeAlias = tuple[Need, NodeOffer]
"""Need of a worker, and its room."""
OUTBID = 1.1
"""Least ratio of two bids at which the higher one takes a lease away."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Standing of a run: its bid, needs of all workers that it wants, and number of those without which it pauses.

    Attributes:
        needs: need of each worker.
        begun: whether it has committed a round with them; until then, it may have to give way with all of them.
        numbers: number of each worker, in the order of their needs; empty: 0, 1, 2 and so on.
        since_s: times by name since which the run has leases, for those of which Ray's table doesn't say it.

    """

    run: str
    bid: float
    needs: tuple[Need, ...]
    least: int
    begun: bool = True
    numbers: tuple[int, ...] = ()
    since_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def needs_by_name(self) -> dict[str, Need]:
        """Need of each worker by the name of its lease."""
        numbers = self.numbers or range(len(self.needs))
        return {f"worker-{number}": need for number, need in zip(numbers, self.needs, strict=True)}


@dataclass(frozen=True, slots=True)
class Holding:
    """Lease that a run has for a worker, since a time that only orders leases of one run."""

    name: str
    node: str
    amounts: Mapping[str, float]
    since_s: float


@dataclass(frozen=True, slots=True)
class Ruling:
    """Ruling on a run: number of workers that it may hold, and names of leases to hand back, each with the reason.

    Attributes:
        needs: number of workers of each need among those that it may hold; None: of any need.
        behind: run that comes before it and waits for its least workers; None without one.

    """

    quota: int
    leave: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[Need, int] | None = field(default=None, compare=False)
    behind: str | None = field(default=None, compare=False)

    def allows(self, need: Need, held: Mapping[Need, int]) -> bool:
        """Whether the run may hold one more worker of a need beside those that it holds or has been allowed."""
        within_needs = self.needs is None or held.get(need, 0) < self.needs.get(need, 0)
        return within_needs and sum(held.values()) < self.quota


class Allotment:
    """Allotment of room among runs, in the order in which they are served.

    Args:
        nodes: nodes, with what is free there.
        standings: runs, those that came first in front.
        holdings: leases of these runs' workers.
        order: "bid" serves the highest bid first; "fair" gives each run a share in the ratio of its bid.

    """

    def __init__(
        self,
        nodes: Sequence[NodeResources],
        standings: Sequence[Standing],
        holdings: Mapping[str, Sequence[Holding]],
        order: Order = "bid",
    ) -> None:
        self._order = order
        self._machines = NodeOffers(nodes)
        self._standings = standings
        self._kept = {one.run: sorted(holdings.get(one.run, ()), key=_age) for one in standings}
        self._granted = {run: len(held) for run, held in self._kept.items()}
        self._needs = {one.run: one.needs_by_name for one in standings}
        self._missing = {one.run: self._needs_without_lease(one) for one in standings}
        """Number of workers of each run and need that have no lease and aren't granted one."""
        self._leave: dict[str, dict[str, str]] = {one.run: {} for one in standings}
        self._undo: list[Callable[[], None]] = []
        """Steps that take back what has been granted and evicted, the latest at the end."""

    def rulings(self) -> dict[str, Ruling]:
        """Serve all runs: first with what they can't do without, the highest bid in front; then with the rest."""
        growing: dict[str, Standing] = {}
        behind: dict[str, str] = {}
        by_bid = sorted(self._standings, key=lambda one: -one.bid)
        for turn, standing in enumerate(by_bid):
            if not self._serve_least(standing):
                behind = {lower.run: standing.run for lower in by_bid[turn + 1 :]}
                break  # A run that bids less takes no room that this one waits for.
            growing[standing.run] = standing
        while growing:
            standing = min(growing.values(), key=self._turn)
            if not self._serve_next(standing):
                del growing[standing.run]
        return {one.run: self._ruling(one, behind.get(one.run)) for one in self._standings}

    def _ruling(self, standing: Standing, behind: str | None) -> Ruling:
        run = standing.run
        missing = self._missing[standing.run]
        may_hold = {need: count - missing[need] for need, count in Counter(standing.needs).items()}
        return Ruling(self._granted[run], self._leave[run], may_hold, behind)

    def _needs_without_lease(self, standing: Standing) -> Counter[Need]:
        held = (self._needs[standing.run].get(held.name) for held in self._kept[standing.run])
        missing = Counter(standing.needs)
        missing.subtract(need for need in held if need is not None)
        return missing

    def _turn(self, standing: Standing) -> float:
        """Rank of a run whose turn may be next: by bid, or by what it would have for its bid."""
        return -standing.bid if self._order == "bid" else self._share(standing, 1)

    def _share(self, standing: Standing, more: int = 0) -> float:
        return (self._granted[standing.run] + more) / _weight(standing)

    def _serve_least(self, standing: Standing) -> bool:
        """Grant all workers together without which the run pauses; False if they find no room."""
        if self._granted[standing.run] >= standing.least:
            return True
        self._undo.clear()
        while self._granted[standing.run] < min(standing.least, len(standing.needs)):
            if not self._serve_next(standing, gangs=True):
                while self._undo:
                    self._undo.pop()()
                return False
        return True

    def _serve_next(self, standing: Standing, gangs: bool = False) -> bool:
        """Grant one more worker, on free room or on that of a lower bid; False if there is neither.

        Only what a run can't do without may take all leases of another one, which would come back for them otherwise.
        """
        if self._granted[standing.run] >= len(standing.needs):
            return False
        needs = [need for need, count in self._missing[standing.run].items() if count > 0]
        granted = self._free_room(standing, needs) or self._take_spare(standing, needs)
        if granted is None and gangs:
            granted = self._take_gang(standing, needs)
        if granted is None:
            return False
        self._grant(standing.run, *granted)
        return True

    def _free_room(self, standing: Standing, needs: Sequence[Need]) -> Grant | None:
        for need in needs:
            if (room := self._machines.free_room(need, standing.bid)) is not None:
                return need, room
        return None

    def _grant(self, run: str, need: Need, room: NodeOffer) -> None:
        self._machines.take(room)
        self._granted[run] += 1
        self._missing[run][need] -= 1
        self._undo.append(partial(self._take_back, run, need, room))

    def _take_back(self, run: str, need: Need, room: NodeOffer) -> None:
        self._machines.give(room.node, room.amounts)
        self._granted[run] -= 1
        self._missing[run][need] += 1

    def _take_spare(self, by: Standing, needs: Sequence[Need]) -> Grant | None:
        """Free room on one node by leases that others can spare: those of the lowest bid or largest share first."""
        taken: dict[str, list[tuple[Standing, Holding]]] = {}
        freed: dict[str, Counter[str]] = {}
        rank = self._share if self._order == "fair" else (lambda one: -one.bid)
        for victim in sorted(self._standings, key=rank, reverse=True):
            kept = self._kept[victim.run]
            spare = self._spare(victim, by)
            for held in reversed(kept[max(0, len(kept) - spare) :]):
                there = taken.setdefault(held.node, [])
                there.append((victim, held))
                room = freed.setdefault(held.node, Counter())
                room.update(held.amounts)
                if (grant := self._opened(by, needs, held.node, room)) is not None:
                    told = f"{by.run} bids {by.bid:g}, and this run {victim.bid:g}"
                    self._evict(there, told if self._order == "bid" else f"{told}, which has more than its share")
                    return grant
        return None

    def _spare(self, victim: Standing, by: Standing) -> int:
        """Number of leases that a run can spare for another: never one of its least."""
        granted = self._granted[victim.run]
        if self._order == "bid":
            beyond = granted if _outbids(by, victim) else 0
        else:
            beyond = math.ceil(granted - self._share(by, 1) * _weight(victim) - 1e-9)
        return max(0, min(beyond, granted - victim.least))

    def _take_gang(self, by: Standing, needs: Sequence[Need]) -> Grant | None:
        """Free room on one node by all leases of one run that has yet to begin."""
        for victim in sorted(self._standings, key=lambda one: one.bid):
            yields = _outbids(by, victim) and not victim.begun
            gang = [(victim, held) for held in self._kept[victim.run]] if yields else []
            freed: dict[str, Counter[str]] = {}
            for _, held in gang:
                freed.setdefault(held.node, Counter()).update(held.amounts)
            for node, amounts in freed.items():
                if (grant := self._opened(by, needs, node, amounts)) is not None:
                    self._evict(gang, f"{by.run} bids {by.bid:g}, and this run {victim.bid:g}")
                    return grant
        return None

    def _opened(self, by: Standing, needs: Sequence[Need], node: str, freed: Mapping[str, float]) -> Grant | None:
        """Room on a node for one of the needs, once these amounts come free."""
        for need in needs:
            if (room := self._machines.room_without(need, by.bid, node, freed)) is not None:
                return need, room
        return None

    def _evict(self, leases: Sequence[tuple[Standing, Holding]], reason: str) -> None:
        for victim, held in leases:
            run = victim.run
            need = self._needs[victim.run].get(held.name)
            self._undo.append(partial(self._spare_again, run, held, self._kept[run].index(held)))
            self._kept[run].remove(held)
            self._granted[run] -= 1
            self._machines.give(held.node, held.amounts)
            self._leave[run][held.name] = reason
            if need is not None:
                self._missing[run][need] += 1

    def _spare_again(self, run: str, held: Holding, index: int) -> None:
        need = self._needs[run].get(held.name)
        self._kept[run].insert(index, held)
        self._granted[run] += 1
        self._machines.take_back(held.node, held.amounts)
        del self._leave[run][held.name]
        if need is not None:
            self._missing[run][need] -= 1


def _weight(standing: Standing) -> float:
    return max(standing.bid, 1e-9)


def _outbids(one: Standing, other: Standing) -> bool:
    return one.bid > other.bid and one.bid >= other.bid * OUTBID


def _age(held: Holding) -> tuple[float, int, str]:
    """Rank of a lease by its age; of leases of one time, the highest number counts as the latest."""
    return held.since_s, len(held.name), held.name
