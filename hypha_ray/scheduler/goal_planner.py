"""Keeps a run's goal: measures its speed, has `market.goal` choose machines, and ends the run before its budget does.

Times are monotonic seconds, prices those of the market.
"""

from __future__ import annotations

import math
from typing import Any

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError
from hypha_ray.market.buyer import HOUR_S
from hypha_ray.market.goal import Decision, Machine, Standing, decide
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.messages import Outbox, ResumePoint
from hypha_ray.scheduler.roster import Roster
from hypha_ray.scheduler.round_strategy import RoundStrategy
from hypha_ray.telemetry.sinks.table import duration

FIRST_START_S = 60.0
"""Seconds of a start, before any worker has been ready."""
LEAST_EFFICIENCY = 0.05
DROPPED = "the goal needs no machine at that price now"


class GoalPlanner:
    """Decides for a run with a goal on each `Quotes`."""

    def __init__(
        self, job: Job, resume_point: ResumePoint, roster: Roster, strategy: RoundStrategy[Any, Any], out: Outbox
    ) -> None:
        self._job = job
        self._goal = job.goal
        self._roster = roster
        self._strategy = strategy
        self._out = out
        self._since_start_s = resume_point.since_start_s
        self._ends_at = math.inf
        """Time of the deadline; infinite without one."""
        self._first_commits = self._commits = strategy.commits
        """Committed rounds at the beginning, and at the decision before."""
        self._first_samples = strategy.samples
        self._possible = 0.0
        """Samples that the workers would have trained on without a wait."""
        self._efficiency = 1.0
        """Samples that were trained on, per sample that was possible; 1 before the first commit."""
        self._measured_at = 0.0
        self._committed_at: float | None = None
        """Time of the first commit that was seen."""
        self._round_s: float | None = None
        self._spot_price = math.inf
        self._quotes: c.Quotes | None = None
        """Newest terms; None before the first."""
        self._quoted_at: float | None = None
        self._interval_s = 0.0
        """Seconds between the newest terms and those before."""
        self._latest: Decision | None = None
        self._is_late = False
        """Whether it was told that the deadline can't be kept."""

    def begin(self, now: float) -> None:
        """Begin to count the time."""
        self._measured_at = now
        if self._goal.by_s is not None:
            self._ends_at = now - self._since_start_s + self._goal.by_s

    def quoted(self, quotes: c.Quotes, now: float) -> None:
        """Choose the workers to have by new terms; none leaves in the middle of a round."""
        self._quotes = quotes
        if self._quoted_at is not None:
            self._interval_s = now - self._quoted_at
        self._quoted_at = now
        self._decide(quotes, now, may_drop=False)

    def committed(self, now: float) -> None:
        """Choose the workers to have, and order some to leave, or end the run."""
        if self._quotes is not None and self._strategy.commits > self._commits:
            self._decide(self._quotes, now, may_drop=True)

    def _decide(self, quotes: c.Quotes, now: float, may_drop: bool) -> None:
        if self._strategy.trained:
            return
        self._measure(now)
        machines = self._machines(quotes)
        money_left = math.inf if self._goal.at_most is None else self._goal.at_most - quotes.spent
        has_committed = self._strategy.commits > self._commits
        self._commits = self._strategy.commits
        if money_left <= self._cost_ahead(quotes, machines, has_committed):
            self._end(quotes.spent, now)
            return
        if not machines:
            return
        standing = self._standing(machines, money_left, now, may_drop)
        decision = decide(standing)
        self._carry_out(decision, quotes.spent, now)
        self._warn(decision, standing, now)

    def _cost_ahead(self, quotes: c.Quotes, machines: list[Machine], has_committed: bool) -> float:
        """Cost up to the next terms or, after a commit, of the whole next round."""
        hourly = sum(terms.price for terms in quotes.workers.values())
        seconds = self._interval_s
        speed = sum(machine.samples_per_s for machine in machines if machine.worker is not None)
        if has_committed and speed:
            seconds = max(seconds, self._job.samples(self._strategy.commits) / speed)
        return hourly * seconds / HOUR_S

    def _measure(self, now: float) -> None:
        """Measure the workers' efficiency and the time of a round, by the commits so far."""
        speeds = self._speeds().values()
        if self._committed_at is not None:
            self._possible += sum(speeds) * (now - self._measured_at)
        self._measured_at = now
        commits = self._strategy.commits - self._first_commits
        if commits and self._committed_at is None:
            self._committed_at = now
            self._first_samples = self._strategy.samples
        elif commits > 1 and self._committed_at is not None and self._strategy.commits > self._commits:
            self._round_s = (now - self._committed_at) / (commits - 1)
        if self._possible and self._strategy.commits > self._commits:
            samples = self._strategy.samples - self._first_samples
            self._efficiency = min(1.0, max(LEAST_EFFICIENCY, samples / self._possible))

    def _speeds(self) -> dict[int, float]:
        """Samples per second of each worker while it trains, by its number's last delta."""
        speeds = {}
        for member in self._roster.assignable:
            speed = self._roster.times.speed(member.source.worker)
            if speed is not None:
                speeds[member.source.worker] = speed
        return speeds

    def _typical_speed(self) -> float | None:
        """Mean speed of all numbers, of which some may have no worker now; None before the first delta."""
        speeds = []
        for worker in self._roster.slots:
            speed = self._roster.times.speed(worker)
            if speed is not None:
                speeds.append(speed)
        return sum(speeds) / len(speeds) if speeds else None

    def _machines(self, quotes: c.Quotes) -> list[Machine]:
        """Machines of the workers that stay, and ones that are free or will be; none before a speed is known."""
        typical_speed = self._typical_speed()
        if typical_speed is None:
            return []
        speeds = self._speeds()
        machines = []
        for worker, terms in quotes.workers.items():
            slot = self._roster.slots[worker]
            speed = self._efficiency * speeds.get(worker, typical_speed)
            stays = slot.source is not None and not slot.leaving
            machines.append(Machine(terms.price, terms.is_firm, speed, worker if stays else None))
        for terms in quotes.offers:
            machines.append(Machine(terms.price, terms.is_firm, self._efficiency * typical_speed))
        prices_of_spot = [machine.price for machine in machines if not machine.is_firm]
        self._spot_price = min([self._spot_price, *prices_of_spot])
        return machines

    def _standing(self, machines: list[Machine], money_left: float, now: float, may_drop: bool) -> Standing:
        resources = self._job.resources
        round_s = self._round_s
        if round_s is None:
            workers = [machine for machine in machines if machine.worker is not None] or machines
            round_s = self._job.samples(self._strategy.commits) / sum(machine.samples_per_s for machine in workers)
        return Standing(
            left_s=self._ends_at - now,
            money_left=money_left,
            samples_left=self._strategy.samples_left,
            machines=machines,
            least=min(resources.min_workers, self._job.num_workers),
            most=self._job.num_workers,
            start_s=self._roster.start_time.mean or FIRST_START_S,
            round_s=round_s,
            spot_price=self._spot_price,
            was_patient=self._latest is None or self._latest.is_patient,
            may_drop=may_drop,
        )

    def _carry_out(self, decision: Decision, spent: float, now: float) -> None:
        self._roster.wanted = decision.wanted
        limits = c.LimitLeases(decision.max_price, decision.firm_only)
        earlier_decision = self._latest
        self._latest = decision
        for worker in decision.drop:
            source = self._roster.slots[worker].source
            if source is not None and self._roster.slots[worker].working and self._roster.leave(source):
                self._out.put(c.Drain(worker, DROPPED))
        has_changed = earlier_decision is None or (earlier_decision.wanted, earlier_decision.is_patient) != (
            decision.wanted,
            decision.is_patient,
        )
        if earlier_decision is None or limits != c.LimitLeases(earlier_decision.max_price, earlier_decision.firm_only):
            self._out.put(limits)
        if has_changed or decision.drop:
            outlook = {
                "max_price": decision.max_price,
                "end_s": decision.end_s,
                "spare_s": decision.spare_s,
                "spent": spent,
                "further_cost": decision.cost,
            }
            finite = {name: value for name, value in outlook.items() if math.isfinite(value)}
            patience_fields = {"waits_for_spot": decision.is_patient}
            leaving = list(decision.drop)
            self._out.event("goal", now, workers=decision.wanted, leaving=leaving, **patience_fields, **finite)

    def _warn(self, decision: Decision, standing: Standing, now: float) -> None:
        """Say once that the deadline can't be kept, as soon as a commit has shown the speed."""
        if decision.spare_s > 0:
            self._is_late = self._is_late and not decision.is_patient
        elif not self._is_late and self._strategy.commits > self._first_commits:
            self._is_late = True
            begun_s = now - (self._ends_at - (self._goal.by_s or 0.0))
            end_text = duration(begun_s + decision.end_s)
            late_text = duration(-decision.spare_s)
            text = f"at this rate the run ends after {end_text}, {late_text} after its goal.by of {self._goal.by}"
            self._out.problem(f"{text}: raise goal.by or {self._remedy(decision, standing)}", now)

    def _remedy(self, decision: Decision, standing: Standing) -> str:
        """Key that stands in the way of more speed."""
        if math.isfinite(standing.money_left) and decision.wanted < min(standing.most, len(standing.machines)):
            return "goal.at_most"
        if len(standing.machines) < standing.most:
            return "add machines"
        return "resources.num_workers, or train on fewer samples"

    def _end(self, spent: float, now: float) -> None:
        """End the run at its last commit."""
        budget = self._goal.budget
        if not self._strategy.commits:
            problem = f"{budget} doesn't pay for the first round; {spent:.4g} is spent"
            self._out.finish(ConfigError("CFG003", problem, fix="raise it, or lower rounds.samples_between_updates"))
            return
        self._strategy.stop(f"{budget} pays for no further round; {spent:.4g} is spent", now)
