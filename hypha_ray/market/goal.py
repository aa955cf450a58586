"""Machines with which a run keeps its goal: a deadline, a budget, or both. Pure, without a clock of its own.

    spare time > twice the margin        spot machines alone; those on demand wait
    more than the margin                 all slots, the cheapest machines first
    less                                 all slots; a machine that is lost is replaced by one on demand

The spare time is that which all slots on machines on demand would leave before the deadline. Such a switch at the last
safe moment is the safety net of Wu et al., "Can't Be Late" (NSDI 2024). Their uniform progress buys machines on demand
before, as a single machine is of one kind. A fleet can be of both, and spot machines may do what is put off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from hypha_ray.market.buyer import HOUR_S

MARGIN = 0.05
"""Part of the time left that losses of machines, and ones slower than those seen before, may cost."""
ROUND_SHARE = 0.3
"""Part of a round that may pass after its last sample."""
CHANGE_GAIN = 0.1
"""Part of the price of a sample that a change of machines has to save."""
HEADROOM = 1.1
"""Excess over the speed that is needed, of machines that aren't the cheapest."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine that a run has or could have."""

    price: float
    """Price per hour."""
    is_firm: bool
    """Whether it stays as long as it is wanted: a machine on demand, and no spot machine."""
    samples_per_s: float
    """Samples that it adds to commits in a second, waits included."""
    worker: int | None = None
    """Number of the worker on it; None if it is offered."""

    @property
    def sample_price(self) -> float:
        """Price of a sample."""
        return self.price / HOUR_S / self.samples_per_s


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a run on the way to its goal. Times in seconds."""

    left_s: float
    """Time until the deadline; infinite without one."""
    money_left: float
    """Rest of the budget; infinite without one."""
    samples_left: int
    machines: Sequence[Machine]
    """Machines of the workers, and offered ones."""
    least: int
    """Workers without which the run pauses."""
    most: int
    """Number of slots for workers."""
    start_s: float
    """Time of a worker's start."""
    round_s: float
    spot_price: float = math.inf
    """Lowest price of a spot machine that the run has seen."""
    was_patient: bool = True
    """Whether the decision before waited for spot machines."""
    may_drop: bool = True
    """Whether workers may leave: between two rounds they lose no time, and all others are ready."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Workers to have, and the outlook with them."""

    wanted: int
    """Number of workers."""
    drop: tuple[int, ...]
    """Numbers of workers that are to leave, because cheaper machines suffice."""
    max_price: float
    """Highest price per hour of a new lease; infinite: any."""
    firm_only: bool
    """Whether a new lease has to be of a machine on demand."""
    is_patient: bool
    """Whether machines on demand wait, because there is time to spare."""
    end_s: float
    """Seconds to the end of the run at the highest speed that the budget allows."""
    spare_s: float
    """Time between that end and the deadline; below 0 the deadline can't be kept, infinite without a deadline."""
    cost: float
    """Further cost of the run with the chosen machines."""


def decide(standing: Standing) -> Decision:
    """Choose machines; with a deadline and a budget that exclude each other, the budget is kept."""
    machines = _affordable(standing, sorted(standing.machines, key=_by_price))
    end_s = _seconds(standing, _fastest(machines, standing.most))
    spare_s = standing.left_s - end_s
    margin_s = _margin_s(standing)
    firm_only = spare_s <= margin_s and any(machine.is_firm for machine in machines)
    is_patient = spare_s > (2 if standing.was_patient else 4) * margin_s
    if is_patient:
        chosen_machines = _cheap_ones(standing, machines, standing.left_s - margin_s)
    elif firm_only:
        chosen_machines = _without_new_spot_machines(machines)
    else:
        chosen_machines = machines
    chosen_machines = _at_least(standing.least, chosen_machines[: standing.most], machines)
    drop = _to_drop(standing, chosen_machines) if standing.may_drop else []
    if not is_patient:
        drop = drop[: max(1, standing.most // 4)]
    prices = list(map(attrgetter("price"), chosen_machines))
    hourly = sum(prices)
    return Decision(
        wanted=len(chosen_machines),
        drop=tuple(drop),
        max_price=max(prices, default=math.inf),
        firm_only=firm_only,
        is_patient=is_patient,
        end_s=end_s,
        spare_s=spare_s,
        cost=hourly * _seconds(standing, chosen_machines) / HOUR_S if hourly else 0.0,
    )


def _without_new_spot_machines(machines: Sequence[Machine]) -> list[Machine]:
    """Machines of the workers, and after them offered ones on demand."""
    own_machines: list[Machine] = []
    firm_offers: list[Machine] = []
    for machine in machines:
        if machine.worker is not None:
            own_machines.append(machine)
        elif machine.is_firm:
            firm_offers.append(machine)
    return own_machines + firm_offers


def _at_least(least_workers: int, chosen_machines: Sequence[Machine], machines: Sequence[Machine]) -> list[Machine]:
    """The chosen machines, and as many further ones as the least number needs."""
    filled_machines = list(chosen_machines)
    chosen_ids = set(map(id, chosen_machines))  # Offers may be equal.
    for machine in machines:
        if len(filled_machines) < least_workers and id(machine) not in chosen_ids:
            filled_machines.append(machine)
    return filled_machines


def _margin_s(standing: Standing) -> float:
    """Time that the end of the run may be later than the machines' speeds say."""
    left_s = standing.left_s if math.isfinite(standing.left_s) else 0.0
    return standing.start_s + ROUND_SHARE * standing.round_s + MARGIN * left_s


def _by_price(machine: Machine) -> tuple[float, bool]:
    """Order by the price of a sample, with an advantage for machines of workers; of equal prices, on demand first."""
    advantage = 1.0 if machine.worker is None else 1.0 - CHANGE_GAIN
    return advantage * machine.sample_price, not machine.is_firm


def _affordable(standing: Standing, machines: Sequence[Machine]) -> list[Machine]:
    """Cheapest machines whose mean price of a sample the budget allows for all samples, but at least the least ones."""
    if math.isinf(standing.money_left):
        return list(machines)
    sample_budget = max(0.0, standing.money_left) / max(1, standing.samples_left)
    affordable: list[Machine] = []
    hourly = speed = 0.0
    for machine in machines:
        hourly += machine.price
        speed += machine.samples_per_s
        if hourly > sample_budget * HOUR_S * speed and len(affordable) >= standing.least:
            break
        affordable.append(machine)
    return affordable


def _fastest(machines: Sequence[Machine], most_workers: int) -> list[Machine]:
    """Machines to rely on: those on demand, and others for the slots that these leave."""
    ranked = sorted(machines, key=lambda machine: (not machine.is_firm, -machine.samples_per_s))
    return ranked[:most_workers]


def _seconds(standing: Standing, machines: Sequence[Machine]) -> float:
    """Time of all samples on these machines."""
    speed = sum(machine.samples_per_s for machine in machines)
    if not standing.samples_left:
        return 0.0
    return standing.samples_left / speed if speed else math.inf


def _cheap_ones(standing: Standing, machines: Sequence[Machine], horizon_s: float) -> list[Machine]:
    """The cheapest machines, and dearer ones as far as these don't suffice; those on demand wait for spot machines.

    Machines of the lowest price all work: to be early costs nothing.
    """
    chosen_machines: list[Machine] = []
    speed = 0.0
    lowest = min((machine.price for machine in machines), default=0.0)
    for machine in machines:
        suffices = speed * horizon_s >= HEADROOM * standing.samples_left
        waits = machine.is_firm and machine.price > standing.spot_price
        if waits or (suffices and machine.price > lowest):
            continue
        chosen_machines.append(machine)
        speed += machine.samples_per_s
    return chosen_machines


def _to_drop(standing: Standing, chosen_machines: Sequence[Machine]) -> list[int]:
    """Workers whose machines aren't chosen, the dearest first; none for another machine of the same price."""
    staying_workers: set[int] = set()
    new_prices: list[float] = []
    for machine in chosen_machines:
        if machine.worker is None:
            new_prices.append(machine.price)
        else:
            staying_workers.add(machine.worker)
    least_price = min(new_prices, default=-1.0)
    drop: list[int] = []
    for machine in sorted(standing.machines, key=lambda machine: -machine.price):
        if machine.worker is not None and machine.worker not in staying_workers and machine.price > least_price:
            drop.append(machine.worker)
    return drop
