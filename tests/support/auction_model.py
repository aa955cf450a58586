"""A model of the auction's rulings for machines that differ only in size: it counts, and knows no places."""

from __future__ import annotations

from dataclasses import dataclass

RATIO = 1.1


@dataclass
class Bidder:
    """A run whose workers need one CPU each, and which holds some."""

    run: str
    bid: float
    wanted: int
    least: int
    begun: bool
    held: int

    def __post_init__(self) -> None:
        self.granted, self.lost = self.held, 0

    @property
    def kept(self) -> int:
        return self.held - self.lost

    def part(self, more: int = 0) -> float:
        return (self.granted + more) / max(self.bid, 1e-9)


class AuctionModel:
    """Runs in the order in which they came, and free CPUs."""

    def __init__(self, bidders: list[Bidder], free: int, fair: bool) -> None:
        self._bidders, self._free, self._fair = bidders, free, fair

    def expected(self) -> dict[str, tuple[int, int]]:
        """Quota of each run, and how many leases it hands back."""
        growing = list[Bidder]()
        for one in sorted(self._bidders, key=lambda one: -one.bid):
            before = self._free, [(each.granted, each.lost) for each in self._bidders]
            while one.granted < min(one.least, one.wanted) and self._grow(one, gangs=True):
                pass
            if one.granted < min(one.least, one.wanted):
                self._free = before[0]
                for each, state in zip(self._bidders, before[1], strict=True):
                    each.granted, each.lost = state
                break
            growing.append(one)
        while growing:
            one = min(growing, key=lambda each: each.part(1)) if self._fair else growing[0]
            if not self._grow(one, gangs=False):
                growing.remove(one)
        return {one.run: (one.granted, one.lost) for one in self._bidders}

    def _grow(self, one: Bidder, gangs: bool) -> bool:
        """One more worker, on a free CPU or on one that another run can spare, or has yet to begin on."""
        if one.granted >= one.wanted:
            return False
        if not self._free:
            self._clear(one, gangs)
        if not self._free:
            return False
        self._free -= 1
        one.granted += 1
        return True

    def _clear(self, one: Bidder, gangs: bool) -> None:
        lower = [each for each in self._bidders if each.bid < one.bid and each.bid * RATIO <= one.bid]
        if self._fair:
            rich = [each for each in self._bidders if each.part() > one.part(1) + 1e-9]
            givers = sorted(rich, key=lambda each: -each.part())
        else:
            givers = sorted(lower, key=lambda each: each.bid)
        for each in givers:
            if each.granted > each.least and each.kept:
                return self._leave(each, 1)
        for each in sorted(lower, key=lambda each: each.bid):
            if gangs and not each.begun and each.kept:
                return self._leave(each, each.kept)
        return None

    def _leave(self, one: Bidder, count: int) -> None:
        one.granted -= count
        one.lost += count
        self._free += count
