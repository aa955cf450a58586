"""Links between machines and the head: transfers share them max-min fairly, as TCP flows of equal round trips do.

    machine's own link ── its site's link ── link of the head's site ── the head's link

A machine in the head's site has no link of sites on its way. Transfers of one direction on equally many transfers'
machines of a group have the same rate at any time, so rates are computed for such classes: their number doesn't grow
with the fleet. A class counts the bytes that each of its transfers has received since the beginning.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, Literal, Protocol, TypeAlias

from hypha_ray.config.keys import KeyPath
from hypha_ray.config.value_types import Table
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.exchange import WEIGHT_BYTES, PayloadSizes, rate_text
from hypha_ray.simulation.scenario import DAY_S, LONGEST_ROUND_DAYS, MachineGroup, Scenario
from hypha_ray.telemetry.sinks.table import si

Direction: TypeAlias = Literal["up", "down"]
"""Up is to the head."""
DIRECTIONS: Final[tuple[Direction, ...]] = ("up", "down")
Then: TypeAlias = Callable[[], None]
"""Action at the end of a transfer."""

UNNOTICED = 0.005
"""Relative change of a class's number of transfers up to which rates are kept: exact below 200 transfers."""
ROOMY = 0.999
"""Part of a link up to which transfers surely leave each other the rates of their own links, whatever is rounded."""
_BITS = 8
_MBPS: Final = {"up_mbps": 1.0, "down_mbps": 1.0, "up_gbps": 1e3, "down_gbps": 1e3}
"""Megabits per second of the unit of a rate, by its key."""
_ROUNDING = 1e-9
"""Part of a transfer's bytes that may be missing at its end, by rounding."""


class Clock(Protocol):
    """Clock of all actions."""

    now: float

    def later(self, seconds: float, action: Then) -> None:
        """Schedule an action."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way between a machine and the head."""

    machine: int
    direction: Direction
    size: int
    then: Then
    remaining: float
    """Bytes that were missing when the transfer joined its class."""
    flow_class: FlowClass | None = None
    """Class of the transfer; None once it has ended."""
    target: float = 0.0
    """Count of its class at which it is complete."""


End: TypeAlias = tuple[float, int, Transfer]
"""Count of its class at which a transfer is complete, the number of its joining, and the transfer."""


@dataclass(slots=True, eq=False)
class FlowClass:
    """Transfers that have equal rates. Rates in bytes per second."""

    limit: float
    """Rate of each transfer that the machine's own link allows."""
    links: tuple[SharedLink, ...]
    transfers: int = 0
    rate: float = 0.0
    received: float = 0.0
    """Bytes that a transfer would have received that was there from the beginning."""
    priced: int = 0
    """Number of transfers when rates were computed last."""
    ends: deque[End] = field(default_factory=deque)
    """Ends of transfers that came in order, as most do; some of the transfers have left the class."""
    early_ends: list[End] = field(default_factory=list)
    """Heap of the other ends."""

    def add(self, end: End) -> None:
        """Add the end of a transfer that joins."""
        self.transfers += 1
        if self.ends and end < self.ends[-1]:
            heapq.heappush(self.early_ends, end)
        else:
            self.ends.append(end)

    def first_end(self) -> End:
        """First end of a transfer that is still in the class; ends of others before it are dropped."""
        while True:
            is_early = bool(self.early_ends) and (not self.ends or self.early_ends[0] < self.ends[0])
            end = self.early_ends[0] if is_early else self.ends[0]
            target, _, transfer = end
            if transfer.flow_class is self and transfer.target == target:
                return end
            if is_early:
                heapq.heappop(self.early_ends)
            else:
                self.ends.popleft()


@dataclass(slots=True, eq=False)
class SharedLink:
    """A link that machines share, with its rate in bytes per second."""

    capacity: float
    unallocated: float = 0.0
    waiting: int = 0
    """Transfers whose rates aren't known yet, while rates are computed."""


class Links:
    """All transfers of a run.

    Args:
        scenario: gives groups of machines, sites and the head.
        clock: clock of all actions.

    """

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self._clock = clock
        self._group_of: list[int] = []
        """Group of each machine."""
        for number, group in enumerate(scenario.machines):
            self._group_of += [number] * group.count
        self._own: dict[tuple[int, Direction], float] = {}
        """Rates of machines' own links, by group."""
        self._shared = _shared_links(scenario)
        self._narrowest = min((link.capacity for links in self._shared.values() for link in links), default=math.inf)
        """Least rate of a shared link: below it, all transfers together leave room on each."""
        for number, group in enumerate(scenario.machines):
            self._own[number, "up"] = _mbps(group.up_mbps)
            self._own[number, "down"] = _mbps(group.down_mbps)
        self._classes: dict[tuple[int, Direction, int], FlowClass] = {}
        self._active: list[FlowClass] = []
        """Classes with transfers."""
        self._on_machine: dict[Direction, list[list[Transfer]]] = {}
        """Transfers of each direction, by machine."""
        for direction in DIRECTIONS:
            self._on_machine[direction] = [[] for _ in self._group_of]
        self._cut: set[int] = set()
        """Machines whose links are cut."""
        self._order = count()
        self._settled_at = 0.0
        self._is_settling = False
        self._is_stale = False
        """Whether a class has ended since rates were computed."""
        self._alarm: object | None = None
        """Token of the next end of a transfer that is scheduled."""

    def send(self, machine: int, direction: Direction, size_bytes: int, on_arrival: Then) -> Transfer:
        """Begin a transfer; `on_arrival` is called at its end, without the latency of the way."""
        transfer = Transfer(machine, direction, size_bytes, on_arrival, float(size_bytes))
        self._advance()
        self._on_machine[direction][machine].append(transfer)
        self._regroup(machine, direction)
        self._settle_soon()
        return transfer

    def cancel(self, machine: int, direction: Direction) -> None:
        """End all transfers of a machine in a direction without calling their actions."""
        self._advance()
        transfers = self._on_machine[direction][machine]
        for transfer in transfers:
            self._leave_class(transfer)
        transfers.clear()
        self._settle_soon()

    def set_cut(self, machine: int, is_cut: bool) -> None:
        """Stop all transfers of a machine, or let them go on."""
        self._advance()
        if is_cut:
            self._cut.add(machine)
        else:
            self._cut.discard(machine)
        self._regroup(machine, "up")
        self._regroup(machine, "down")
        self._settle_soon()

    # ── classes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _regroup(self, machine: int, direction: Direction) -> None:
        """Put a machine's transfers of a direction into the class of their number."""
        transfers = self._on_machine[direction][machine]
        if not transfers:
            return
        number = 0 if machine in self._cut else len(transfers)
        flow_class = self._class_of(self._group_of[machine], direction, number)
        for transfer in transfers:
            if transfer.flow_class is flow_class:
                continue
            self._leave_class(transfer)
            transfer.flow_class = flow_class
            transfer.target = flow_class.received + transfer.remaining
            if not flow_class.transfers:
                self._active.append(flow_class)
            flow_class.add((transfer.target, next(self._order), transfer))

    def _class_of(self, group: int, direction: Direction, number: int) -> FlowClass:
        """Class of transfers on machines with so many of them; 0: the machine's link is cut."""
        key = (group, direction, number)
        flow_class = self._classes.get(key)
        if flow_class is None:
            limit = self._own[group, direction] / number if number else 0.0
            flow_class = self._classes[key] = FlowClass(limit, self._shared[group, direction])
        return flow_class

    def _leave_class(self, transfer: Transfer) -> None:
        flow_class = transfer.flow_class
        if flow_class is None:
            return
        missing = transfer.target - flow_class.received
        transfer.remaining = missing if missing > 0.0 else 0.0
        transfer.flow_class = None
        flow_class.transfers -= 1
        if not flow_class.transfers:
            self._active.remove(flow_class)
            self._is_stale = True
            flow_class.ends.clear()
            flow_class.early_ends.clear()
            flow_class.received = 0.0
            flow_class.priced = 0

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self) -> None:
        """Count what has been received until now."""
        now = self._clock.now
        passed_s = now - self._settled_at
        self._settled_at = now
        if passed_s > 0.0:
            for flow_class in self._active:
                if flow_class.rate < math.inf:
                    flow_class.received += flow_class.rate * passed_s

    def _settle_soon(self) -> None:
        """Compute rates once all that happens at this time has happened."""
        if not self._is_settling:
            self._is_settling = True
            self._clock.later(0.0, self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        self._advance()
        if self._is_stale or self._is_repriced():
            self._compute_rates()
        self._set_alarm()

    def _is_repriced(self) -> bool:
        """Whether the number of a class's transfers has changed by more than goes unnoticed."""
        for flow_class in self._active:
            if abs(flow_class.transfers - flow_class.priced) > UNNOTICED * flow_class.priced:
                return True
        return False

    def _set_alarm(self) -> None:
        """Schedule the next end of a transfer."""
        next_s = math.inf
        for flow_class in self._active:
            rate = flow_class.rate
            if rate > 0.0:
                missing = flow_class.first_end()[0] - flow_class.received
                seconds = missing / rate if missing > 0.0 else 0.0
                next_s = min(next_s, seconds)
        token = self._alarm = object()
        if next_s < math.inf:
            self._clock.later(next_s, partial(self._ring, token))

    def _ring(self, token: object) -> None:
        """End the transfers that are complete."""
        if self._alarm is not token:
            return
        self._advance()
        # On a very fast link the rest may take less time than the clock can tell: then it would ring for ever.
        least_s = math.ulp(self._clock.now)
        ended_transfers: list[Transfer] = []
        for flow_class in list(self._active):
            least_bytes = flow_class.rate * least_s
            while flow_class.transfers:
                target, _, first_transfer = flow_class.first_end()
                missing = target - flow_class.received
                if missing > least_bytes and missing > _ROUNDING * max(1, first_transfer.size):
                    break
                self._leave_class(first_transfer)
                ended_transfers.append(first_transfer)
        is_shared = False
        for transfer in ended_transfers:
            transfers = self._on_machine[transfer.direction][transfer.machine]
            transfers.remove(transfer)
            is_shared = is_shared or bool(transfers)
        if is_shared:
            for transfer in ended_transfers:
                self._regroup(transfer.machine, transfer.direction)
        self._settle_soon()
        for transfer in ended_transfers:
            transfer.then()

    # ── rates ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _compute_rates(self) -> None:
        """Raise the rates of all classes alike until their own link or a shared one is full (progressive filling)."""
        self._is_stale = False
        demand = 0.0
        """Bytes per second of all transfers at the rates of their own links."""
        for flow_class in self._active:
            flow_class.priced = flow_class.transfers
            demand += flow_class.limit * flow_class.transfers
        if demand < ROOMY * self._narrowest or self._has_room():
            for flow_class in self._active:
                flow_class.rate = flow_class.limit
        else:
            self._fill(list(self._active))

    def _has_room(self) -> bool:
        """Whether no shared link is full at the rates of the transfers' own links."""
        demands: dict[SharedLink, float] = {}
        for flow_class in self._active:
            demand = flow_class.limit * flow_class.transfers
            for link in flow_class.links:
                demands[link] = demands.get(link, 0.0) + demand
        return all(demand < ROOMY * link.capacity for link, demand in demands.items())

    def _fill(self, waiting_classes: list[FlowClass]) -> None:
        """Compute rates of classes if a shared link may be full."""
        links = list(dict.fromkeys(link for flow_class in waiting_classes for link in flow_class.links))
        for link in links:
            link.unallocated = link.capacity
            link.waiting = 0
        for flow_class in waiting_classes:
            for link in flow_class.links:
                link.waiting += flow_class.transfers
        while waiting_classes:
            shares = [link.unallocated / link.waiting for link in links if link.waiting]
            rate = min([flow_class.limit for flow_class in waiting_classes] + shares)
            full = [link for link in links if link.waiting and link.unallocated / link.waiting <= rate]
            remaining_classes: list[FlowClass] = []
            for flow_class in waiting_classes:
                is_full = flow_class.limit <= rate or any(link in full for link in flow_class.links)
                if not is_full:
                    remaining_classes.append(flow_class)
                    continue
                flow_class.rate = rate
                for link in flow_class.links:
                    link.unallocated = max(0.0, link.unallocated - rate * flow_class.transfers)
                    link.waiting -= flow_class.transfers
            waiting_classes = remaining_classes


def _shared_links(scenario: Scenario) -> dict[tuple[int, Direction], tuple[SharedLink, ...]]:
    """Links that each group's machines share on their way to the head and from it."""
    head = scenario.head
    head_links = {"up": SharedLink(_gbps(head.down_gbps)), "down": SharedLink(_gbps(head.up_gbps))}
    to_site: dict[str, SharedLink] = {}
    from_site: dict[str, SharedLink] = {}
    for site in scenario.sites:
        from_site[site.name] = SharedLink(_gbps(site.up_gbps))
        to_site[site.name] = SharedLink(_gbps(site.down_gbps))
    links: dict[tuple[int, Direction], tuple[SharedLink, ...]] = {}
    for number, group in enumerate(scenario.machines):
        up_links = [head_links["up"]]
        down_links = [head_links["down"]]
        if not is_beside_head(scenario, group):
            up_links += [links_of[name] for links_of, name in ((from_site, group.site), (to_site, head.site)) if name]
            down_links += [links_of[name] for links_of, name in ((from_site, head.site), (to_site, group.site)) if name]
        links[number, "up"] = tuple(link for link in up_links if link.capacity < math.inf)
        links[number, "down"] = tuple(link for link in down_links if link.capacity < math.inf)
    return links


def is_beside_head(scenario: Scenario, group: MachineGroup) -> bool:
    """Whether a group's machines are in the head's site."""
    return group.site is None or group.site == scenario.head.site


def _mbps(rate: float | None) -> float:
    """Bytes per second of a rate in Mbit/s; None is no limit."""
    return math.inf if rate is None else rate * 1e6 / _BITS


def _gbps(rate: float | None) -> float:
    return math.inf if rate is None else rate * 1e9 / _BITS


def require_fast_links(scenario: Scenario, locate: Callable[[KeyPath], str]) -> None:
    """Refuse links and a head that are too slow for what one worker sends or gets in a round.

    Args:
        scenario: gives rates, and the job and model whose payloads they are for.
        locate: gives a key as an error names it.

    Raises:
        ConfigError: CFG003, a payload, its merge or a snapshot would take longer than any round may.

    """
    sizes = PayloadSizes(scenario.job_of_run, scenario.model.parameters)
    delta_bytes = sizes.delta_bytes(0)
    size_bytes = {"up": delta_bytes, "down": sizes.coded_bytes(0) or delta_bytes}
    for path, mbps in _rates(scenario):
        direction = path[-1].partition("_")[0]
        bytes_per_s = mbps * 1e6 / _BITS
        require_short(locate(path), rate_text(mbps), "a payload", size_bytes[direction], bytes_per_s)
    head = scenario.head
    if head.reduce_gb_s is not None:
        decoded_bytes = min(sizes.fragments) * WEIGHT_BYTES
        rate = f"{head.reduce_gb_s:g} GB/s"
        require_short(locate(("head", "reduce_gb_s")), rate, "a delta", decoded_bytes, head.reduce_gb_s * 1e9)
    if head.commit_mb_s is not None:
        snapshot_bytes = 2 * WEIGHT_BYTES * scenario.model.parameters
        rate = f"{head.commit_mb_s:g} MB/s"
        require_short(locate(("head", "commit_mb_s")), rate, "a snapshot", snapshot_bytes, head.commit_mb_s * 1e6)


def require_short(key: str, rate: str, name: str, size_bytes: int, bytes_per_s: float) -> None:
    """Refuse, with CFG003, a rate at which a size takes longer than any round may."""
    days = size_bytes / bytes_per_s / DAY_S
    if days > LONGEST_ROUND_DAYS:
        got = f"{rate}, at which {name} of {si(size_bytes)}B takes {days:.3g} days"
        allowed = f"up to {LONGEST_ROUND_DAYS} days"
        problem = f"{key} is too low for the model"
        raise ConfigError("CFG003", problem, got, allowed, "give a higher rate, or a smaller model")


def _rates(scenario: Scenario) -> Iterator[tuple[KeyPath, float]]:
    """Rates of all links with a limit, in megabits per second, and their keys."""
    links: list[tuple[KeyPath, Table]] = [(("head",), scenario.head)]
    for number, site in enumerate(scenario.sites):
        links.append((("sites", str(number)), site))
    for number, group in enumerate(scenario.machines):
        links.append((("machines", str(number)), group))
    for path, table in links:
        for name, mbps_of_unit in _MBPS.items():
            rate = getattr(table, name, None)
            if rate is not None:
                yield (*path, name), rate * mbps_of_unit
