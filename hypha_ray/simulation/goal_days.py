"""Days of a job with a goal, each with a seed of its own, beside the least cost that knows each day's market.

That cost is a bound for every policy: machines start and change at once. Its trace of the machines comes from the same
models of failures, without any worker. Waits and exchanges take as large a part of the time as on machines on demand
alone. A second bound leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypha_ray.config.resources import Goal
from hypha_ray.config.schema import samples_of_rounds
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.failures import HOUR_S, FailureSchedule
from hypha_ray.simulation.result import SimulationResult
from hypha_ray.simulation.scenario import Machine, Scenario, machines_of
from hypha_ray.simulation.world import VirtualClock


@dataclass(frozen=True, slots=True)
class Day:
    """One run with a deadline."""

    seed: int
    time_s: float
    cost: float
    least_cost: float
    """Cost of a policy that knows the market of the day, at least; infinite if none can keep the deadline."""
    bare_cost: float
    """The same for a training without waits and exchanges."""
    is_missed: bool
    """Whether the run wasn't complete by its deadline."""

    def as_json(self) -> dict[str, Any]:
        """Figures as plain values."""
        return {
            "seed": self.seed,
            "time_s": round(self.time_s, 3),
            "cost": round(self.cost, 6),
            "least_cost": _finite(self.least_cost),
            "bare_cost": _finite(self.bare_cost),
            "missed": self.is_missed,
        }


def _finite(cost: float) -> float | None:
    """A cost as JSON has it; None if it is infinite."""
    return round(cost, 6) if math.isfinite(cost) else None


def scenarios_of_days(scenario: Scenario, days: int) -> list[Scenario]:
    """The scenario with consecutive seeds.

    Raises:
        ConfigError: CFG012, its job has no deadline.

    """
    if scenario.job.goal.by_s is None:
        raise ConfigError(
            "CFG012", "job.goal.by is missing", fix="give the deadline, or simulate the scenario deadline"
        )
    return [scenario.model_copy(update={"seed": scenario.seed + day}) for day in range(days)]


def firm_scenario(scenario: Scenario) -> Scenario:
    """The scenario on its machines on demand alone, all of which work from the beginning, as if there were no goal.

    Raises:
        ConfigError: CFG012, there are too few of them for all workers.

    """
    groups = tuple(group for group in scenario.machines if group.is_firm)
    if sum(group.count for group in groups) < scenario.workers:
        problem = "too few machines are on demand: without failures, diurnal and available"
        raise ConfigError("CFG012", problem, fix=f"describe {scenario.workers} or more in [[machines]]")
    job = scenario.job.model_copy(update={"goal": Goal()})
    return scenario.model_copy(update={"machines": groups, "job": job})


def efficiency_of(scenario: Scenario, result: SimulationResult) -> float:
    """Samples of a run of `firm_scenario`, per sample of its machines without waits."""
    speed = 0.0
    for machine in machines_of(scenario)[: scenario.workers]:
        speed += scenario.job.rounds.max_batch_size / machine.nominal_batch_s
    return result.samples / (speed * result.time_s)


def day_of(scenario: Scenario, result: SimulationResult, efficiency: float) -> Day:
    """Judge a run by its goal; `efficiency` is that of a run on demand alone."""
    deadline_s = scenario.job.goal.by_s or 0.0
    is_complete = result.failure is None and result.rounds == scenario.job_of_run.rounds.update_rounds
    is_missed = not is_complete or result.time_s > deadline_s
    least_cost_of_day = least_cost(scenario, deadline_s, efficiency)
    bare = least_cost(scenario, deadline_s)
    return Day(scenario.seed, result.time_s, result.cost, least_cost_of_day, bare, is_missed)


def lines_of_days(days: Sequence[Day]) -> list[str]:
    """Summary of all days, as lines for the console."""
    missed = [day.seed for day in days if day.is_missed]
    cost = sum(day.cost for day in days) / len(days)
    mean_least_cost = sum(day.least_cost for day in days) / len(days)
    bare = sum(day.bare_cost for day in days) / len(days)
    longest = max(days, key=lambda day: day.time_s)
    seeds = f", of seeds {', '.join(map(str, missed))}" if missed else ""
    return [
        f"days: {len(days)}; deadlines missed: {len(missed)}{seeds}",
        f"mean cost: {cost:.2f}; least cost that knows each day's market: {_beside(cost, mean_least_cost)}",
        f"without waits and exchanges it would be: {_beside(cost, bare)}",
        f"longest run: {longest.time_s / HOUR_S:.2f} h, of seed {longest.seed}",
    ]


def _beside(cost: float, bound: float) -> str:
    """A bound with the ratio of the cost to it, unless no policy keeps all deadlines, or machines have no price."""
    if math.isinf(bound):
        return "none, since no policy can keep all deadlines"
    if not bound:
        return "0.00"
    return f"{bound:.2f}; ratio: {cost / bound:.3f}"


def least_cost(scenario: Scenario, until_s: float, efficiency: float = 1.0) -> float:
    """Least cost of all samples by a time, at a part of the machines' speeds; infinite if they can't be done."""
    job = scenario.job_of_run
    samples = samples_of_rounds(job) / efficiency
    pieces: list[tuple[float, float]] = []
    """Price of a sample, and samples, of each machine between two changes of the market."""
    for seconds, machines in _market(scenario, until_s):
        cheapest = sorted(machines, key=partial(_sample_price, job.rounds.max_batch_size))
        for machine in cheapest[: job.num_workers]:
            speed = job.rounds.max_batch_size / machine.nominal_batch_s
            pieces.append((_sample_price(job.rounds.max_batch_size, machine), speed * seconds))
    cost = 0.0
    for price, possible in sorted(pieces):
        used_samples = min(possible, samples)
        cost += price * used_samples
        samples -= used_samples
    return cost if samples <= 0 else float("inf")


def _sample_price(batch_size: int, machine: Machine) -> float:
    return machine.group.price / HOUR_S * machine.nominal_batch_s / batch_size


def _market(scenario: Scenario, until_s: float) -> Iterator[tuple[float, list[Machine]]]:
    """Seconds between two changes of the market, and the machines that are there."""
    machines = machines_of(scenario)
    host = _Observer()
    FailureSchedule(scenario, machines, host).start()
    while host.now < until_s:
        began_at = host.now
        available_machines = [machine for machine in machines if machine.available]
        host.clock.advance(until_s)
        if host.now > began_at:
            yield host.now - began_at, available_machines


class _Observer:
    """World without workers, in which machines come and go."""

    def __init__(self) -> None:
        self.clock = VirtualClock()

    @property
    def now(self) -> float:
        """Present time in seconds."""
        return self.clock.now

    def later(self, seconds: float, action: Any) -> None:
        """Schedule an action."""
        self.clock.later(seconds, action)

    def kill(self, machine: Machine) -> None:
        """Nothing: the machine stays."""

    hang = kill

    def partition(self, machine: Machine, seconds: float) -> None:
        """Nothing: the machine stays."""

    def preempt(self, machine: Machine, notice_s: float, reason: str) -> None:
        """Take the machine away after its notice, in which a policy that knows of it still uses it."""
        self.later(notice_s, partial(self.leave, machine, reason))

    def leave(self, machine: Machine, reason: str) -> None:
        """Take the machine away."""
        machine.absences |= {reason}

    def join(self, machine: Machine, reason: str) -> None:
        """Bring the machine back."""
        machine.absences -= {reason}
