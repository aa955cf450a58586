"""Machines of a scenario: their speeds, which drift and stray, and whether they can be had.

Each machine has random numbers of its own for each purpose, so a change of one machine leaves all others as they are.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

from hypha_ray.simulation.scenario import MachineGroup, Scenario


def dice_of(seed: int, *names: object) -> random.Random:
    """Random numbers for one purpose, independent of all others."""
    return random.Random("/".join(map(str, (seed, *names))))


class Machine:
    """One machine.

    Args:
        number: number among all machines.
        rank: number within its group.
        group: its group.
        seed: seed of the scenario.

    """

    __slots__ = (
        "_batch_dice",
        "_is_slow",
        "_phase",
        "_slow_until",
        "_start_dice",
        "_straggling_factor",
        "_strays",
        "_times",
        "absences",
        "began_at",
        "cut_until",
        "group",
        "leased_at",
        "leased_s",
        "nominal_batch_s",
        "number",
        "rank",
        "worker",
    )

    def __init__(self, number: int, rank: int, group: MachineGroup, seed: int) -> None:
        self.number = number
        self.rank = rank
        self.group = group
        self.absences: frozenset[str] = frozenset()
        """Reasons for which it can't be had now; it is there if there is none."""
        self.worker: int | None = None
        """Number of the worker that has leased it; None without a lease."""
        self.leased_at: float | None = None
        """Time at which the present lease began; None without one."""
        self.leased_s = 0.0
        """Seconds of all leases that have ended."""
        self.began_at: float | None = None
        """Time at which its first worker was ready; None before."""
        self.cut_until = 0.0
        """Time until which its link is cut."""
        speed_dice = dice_of(seed, number, "speed")
        times = self._times = group.batch_s
        self.nominal_batch_s = times.median * math.exp(times.spread * speed_dice.gauss(0.0, 1.0))
        """Seconds of a batch without jitter, drift and stragglers' times."""
        self._phase = speed_dice.uniform(0.0, 2 * math.pi)
        """Phase of its drift."""
        self._batch_dice = dice_of(seed, number, "batch")
        self._start_dice = dice_of(seed, number, "start")
        self._strays = group.stragglers.share > 0
        self._straggling_factor = group.stragglers.factor
        self._is_slow = True  # The first turn, which comes at once, makes it fast or slow.
        self._slow_until = 0.0
        """Time of the next turn from slow to fast, or back."""

    @property
    def available(self) -> bool:
        """Whether it is there."""
        return not self.absences

    @property
    def is_free(self) -> bool:
        """Whether it can be leased."""
        return self.available and self.leased_at is None

    def batch_s(self, now: float) -> float:
        """Seconds of a batch that begins now."""
        times = self._times
        seconds = self.nominal_batch_s
        if times.jitter:
            seconds *= math.exp(times.jitter * self._batch_dice.gauss(0.0, 1.0))
        if times.drift:
            angle = 2 * math.pi * now / times.drift_period_s + self._phase
            seconds *= 1.0 + times.drift * math.sin(angle)
        if not self._strays:
            return seconds
        if self._slow_until > now:
            return seconds * self._straggling_factor if self._is_slow else seconds
        return seconds * self._straggling(now)

    def skip_batch(self, now: float) -> None:
        """Throw the dice of a batch that begins now, without a batch: the times of later ones are told by them."""
        if self._times.jitter:
            self._batch_dice.gauss(0.0, 1.0)
        if self._strays and self._slow_until <= now:
            self._straggling(now)

    def start_s(self) -> float:
        """Seconds of a start that begins now."""
        times = self.group.start_s
        return times.median * math.exp(times.spread * self._start_dice.gauss(0.0, 1.0))

    def lease(self, worker: int, now: float) -> None:
        """Begin a lease, for the worker of that number."""
        self.worker = worker
        self.leased_at = now

    def release(self, now: float) -> None:
        """End the lease, if there is one."""
        if self.leased_at is not None:
            self.leased_s += now - self.leased_at
            self.leased_at = None
            self.worker = None

    def lease_s(self, now: float) -> float:
        """Seconds of all leases until now."""
        if self.leased_at is None:
            return self.leased_s
        return self.leased_s + now - self.leased_at

    def _straggling(self, now: float) -> float:
        """Factor of a batch that begins now; slow and fast times alternate, and are exponentially distributed."""
        stragglers = self.group.stragglers
        if self._slow_until == 0.0:
            self._is_slow = self._batch_dice.random() < stragglers.share
            self._slow_until = self._batch_dice.expovariate(1.0) * self._mean_turn_s()
        while self._slow_until <= now:
            self._is_slow = not self._is_slow
            self._slow_until += self._batch_dice.expovariate(1.0) * self._mean_turn_s()
        return stragglers.factor if self._is_slow else 1.0

    def _mean_turn_s(self) -> float:
        """Mean seconds of a slow time or, while the machine is fast, of a fast one."""
        stragglers = self.group.stragglers
        if self._is_slow:
            return stragglers.for_s
        if stragglers.share >= 1.0:
            return 0.0
        return stragglers.for_s * (1.0 - stragglers.share) / stragglers.share


class MachinePool:
    """All machines, and those that are free.

    Args:
        machines: in the order of their numbers.

    """

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = machines
        self._free: list[int] = []
        """Heap of numbers of machines that were free when they were added."""

    def free_count(self) -> int:
        """Number of free machines."""
        return sum(machine.is_free for machine in self.machines)

    def lease(self, worker: int, now: float) -> Machine | None:
        """Lease the machine of the worker's own number if it is free, otherwise the first that is; None if none is."""
        own = self.machines[worker]
        machine = own if own.is_free else self._first_free()
        if machine is not None:
            machine.lease(worker, now)
        return machine

    def lease_cheapest(self, worker: int, now: float, max_price: float, firm_only: bool) -> Machine | None:
        """Lease the cheapest free machine within the limits of a goal; None if there is none."""
        candidates = []
        for machine in self.machines:
            group = machine.group
            if machine.is_free and group.price <= max_price and (group.is_firm or not firm_only):
                candidates.append(machine)
        cheapest = min(candidates, key=lambda candidate: candidate.group.price, default=None)
        if cheapest is not None:
            cheapest.lease(worker, now)
        return cheapest

    def release(self, machine: Machine, now: float) -> None:
        """End a machine's lease, if there is one."""
        machine.release(now)
        self._note_if_free(machine)

    def take_away(self, machine: Machine, reason: str) -> None:
        """Let a machine no longer be leased, for a reason; its lease goes on until it is released."""
        machine.absences |= {reason}

    def give_back(self, machine: Machine, reason: str) -> None:
        """End the absence of a machine for a reason; it can be had if there is no other reason."""
        machine.absences -= {reason}
        self._note_if_free(machine)

    def add_all(self) -> None:
        """Count all machines that are free."""
        self._free = [machine.number for machine in self.machines if machine.is_free]

    def _note_if_free(self, machine: Machine) -> None:
        if machine.is_free:
            heapq.heappush(self._free, machine.number)

    def _first_free(self) -> Machine | None:
        while self._free:
            machine = self.machines[heapq.heappop(self._free)]
            if machine.is_free:
                return machine
        return None


def machines_of(scenario: Scenario) -> list[Machine]:
    """All machines of a scenario, in the order of its groups."""
    machines: list[Machine] = []
    for group in scenario.machines:
        for rank in range(group.count):
            machines.append(Machine(len(machines), rank, group, scenario.seed))
    return machines
