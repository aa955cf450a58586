"""Goodput of other ways to train under the same failures: models of DDP with restarts, Ray Train and torchft.

Each model is a function of a trace of failures. All machines are equally fast, and gradients are exchanged in no time:
assumptions that favour the models. Goodput is useful machine time ÷ the time of all machines, down or not.

Trace of a scenario's failures without any training: what strikes the machines, and for how long they are away.

Comparison of a simulated run with models of other ways to train under the same failures, as text and as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hypha_ray.simulation.failures import FailureSchedule
from hypha_ray.simulation.result import SimulationResult
from hypha_ray.simulation.scenario import Machine, Scenario, machines_of
from hypha_ray.simulation.world import VirtualClock
from hypha_ray.telemetry.sinks.table import duration
from hypha_ray.texts import counted

CUT = "cut"
"""Reason of the absence of a machine whose link is cut."""
OURS = "hypha_ray, simulated"
RESTARTS_S = (30.0, 60.0, 180.0, 600.0)
"""Times of a restart for which the models are shown."""
ASSUMPTIONS = (
    "all: equal machines; no failure takes time to notice; gradients are exchanged in no time",
    "DDP: a failure stops all; checkpoints at Young's (CACM 17(9), 1974) and Daly's (FGCS 22(3), 2006) interval",
    "Ray Train 2.60 with a range of workers: the group restarts with what is there, and again for machines that return",
    "torchft: a failure costs half a step and a pause of 5 s, its heartbeat's timeout; a return costs the same pause",
    "a restart of 3 min is the short end of 3 to 10 min in arXiv 2602.00277 (abstract); --restart-s sets it",
)


@dataclass(frozen=True, slots=True)
class MachineFailure:
    """A failure that ends what a machine does. Times in seconds."""

    at_s: float
    machine: int
    down_s: float = 0.0
    """Time until the machine is there again; 0 if only its process died."""


@dataclass(frozen=True, slots=True)
class RivalCosts:
    """Times that the models take as given, in seconds."""

    checkpoint_s: float = 10.0
    """Pause of training for a checkpoint."""
    restart_s: float = 180.0
    """From a failure to processes that train again, once all machines are there."""
    reload_s: float = 30.0
    """Loading of a checkpoint at a restart, or of the weights of another machine."""
    step_s: float = 1.0
    """Length of an optimizer step, of which torchft loses one at each failure."""
    reconfigure_s: float = 5.0
    """Pause of all machines at a change of torchft's quorum: its heartbeat times out after 5 s."""
    resize_s: float = 60.0
    """Interval at which Ray Train looks for more machines: `elastic_resize_monitor_interval_s`."""

    @property
    def recovery_s(self) -> float:
        """Time from machines to training that goes on."""
        return self.restart_s + self.reload_s


def young_interval(checkpoint_s: float, mean_s: float) -> float:
    """Time of training between checkpoints by Young (CACM 17(9), 1974): √(2·C·M), in seconds.

    Args:
        checkpoint_s: time of a checkpoint, C.
        mean_s: mean time between failures of all machines together, M.

    """
    return math.sqrt(2 * checkpoint_s * mean_s)


def daly_interval(checkpoint_s: float, mean_s: float) -> float:
    """Time of training between checkpoints by Daly's higher-order formula (FGCS 22(3), 2006), in seconds.

    √(2·C·M)·(1 + √(C/2M)/3 + (C/2M)/9) − C, and M if checkpoints take longer than 2·M; for the arguments, see Young's.
    """
    if math.isinf(mean_s):
        return math.inf
    if checkpoint_s >= 2 * mean_s:
        return mean_s
    ratio = checkpoint_s / (2 * mean_s)
    return math.sqrt(2 * checkpoint_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def mean_time_between(failures: Sequence[MachineFailure], horizon_s: float) -> float:
    """Mean time between two failures of all machines together, in seconds; infinite without a failure."""
    count = sum(failure.at_s < horizon_s for failure in failures)
    return horizon_s / count if count else math.inf


def saved_training(elapsed_s: float, interval_s: float, checkpoint_s: float) -> tuple[float, float]:
    """Seconds of training that checkpoints have saved, and those since the last one, after so much undisturbed time."""
    if math.isinf(interval_s):
        return 0.0, elapsed_s
    cycles, rest_s = divmod(elapsed_s, interval_s + checkpoint_s)
    return cycles * interval_s, min(rest_s, interval_s)


class Machines:
    """Machines that are down, as time goes on.

    Args:
        count: number of machines.

    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._up_at: dict[int, float] = {}

    def fail(self, failure: MachineFailure) -> None:
        """Take a machine down for the time of a failure."""
        up_at = failure.at_s + failure.down_s
        self._up_at[failure.machine] = max(up_at, self._up_at.get(failure.machine, 0.0))

    def is_up(self, machine: int, now: float) -> bool:
        """Whether a machine is there."""
        return self._up_at.get(machine, 0.0) <= now

    def up(self, now: float) -> set[int]:
        """Machines that are there."""
        return {machine for machine in range(self.count) if self.is_up(machine, now)}

    @property
    def all_up_at(self) -> float:
        """Time from which all machines are there."""
        return max(self._up_at.values(), default=0.0)

    def next_up(self, now: float) -> float:
        """First time after `now` at which a machine comes back; infinity if none does."""
        return min((at_s for at_s in self._up_at.values() if at_s > now), default=math.inf)


def ddp_goodput(
    failures: Sequence[MachineFailure], machines: int, horizon_s: float, costs: RivalCosts, interval_s: float
) -> float:
    """Goodput of DDP (or FSDP) with restarts: every failure stops all, and all machines are needed to go on.

    Args:
        failures: failures in the order of their times.
        machines: number of machines.
        horizon_s: length of the run; training since the last checkpoint before it counts.
        costs: times of checkpoints and restarts.
        interval_s: time of training between two checkpoints.

    """
    down = Machines(machines)
    useful_s = 0.0
    training_since = 0.0
    for failure in failures:
        if failure.at_s >= horizon_s:
            break
        if failure.at_s > training_since:
            saved_s, _ = saved_training(failure.at_s - training_since, interval_s, costs.checkpoint_s)
            useful_s += saved_s
        down.fail(failure)
        training_since = max(failure.at_s, down.all_up_at) + costs.recovery_s
    if training_since < horizon_s:
        useful_s += sum(saved_training(horizon_s - training_since, interval_s, costs.checkpoint_s))
    return useful_s / horizon_s


def elastic_goodput(
    failures: Sequence[MachineFailure], machines: int, horizon_s: float, costs: RivalCosts, interval_s: float
) -> float:
    """Goodput of Ray Train v2 with a range of workers; for the arguments, see `ddp_goodput`.

    A failure in the group stops all, and those that are there go on from the last checkpoint at once. Every
    `resize_s` the group is stopped for machines that have come back, and goes on with them from its last checkpoint.
    """
    down = Machines(machines)
    group = down.up(0.0)
    useful_s = 0.0
    training_since = 0.0
    pending_failures = [failure for failure in failures if failure.at_s < horizon_s]
    failure_index = 0
    while training_since < horizon_s:
        resize_at = _resize_at(down, group, training_since, costs.resize_s)
        failure_at = pending_failures[failure_index].at_s if failure_index < len(pending_failures) else math.inf
        end_s = min(resize_at, failure_at, horizon_s)
        if failure_at <= end_s:
            failure = pending_failures[failure_index]
            failure_index += 1
            down.fail(failure)
            if failure.machine not in group:
                continue
        elapsed_s = max(0.0, end_s - training_since)
        saved_s, unsaved_s = saved_training(elapsed_s, interval_s, costs.checkpoint_s)
        useful_s += len(group) * (saved_s if end_s < horizon_s else saved_s + unsaved_s)
        group = down.up(end_s)
        restarts_at = end_s
        if not group:
            restarts_at = down.next_up(end_s)
            group = down.up(restarts_at)
        training_since = restarts_at + costs.recovery_s
    return useful_s / (machines * horizon_s)


def _resize_at(down: Machines, group: set[int], after_s: float, every_s: float) -> float:
    """First check after `after_s` at which more machines are there than in the group; infinity if none comes back."""
    if len(group) == down.count:
        return math.inf
    now = after_s + every_s
    while now < math.inf:
        if len(down.up(now)) > len(group):
            return now
        next_up = down.next_up(now)
        if math.isinf(next_up):
            return math.inf
        now = after_s + math.ceil((next_up - after_s) / every_s) * every_s
    return math.inf


def torchft_goodput(failures: Sequence[MachineFailure], machines: int, horizon_s: float, costs: RivalCosts) -> float:
    """Goodput of torchft with a replica on each machine; for the arguments, see `ddp_goodput`.

    A failure costs all the step in progress, half a step in the mean, and the pause until the quorum is changed. The
    machine's successor starts once the machine is there, loads the weights of another one, and joins after another
    pause of all. No checkpoints are counted.
    """
    changes: list[tuple[float, int, int, float]] = []
    """Times at which machines stop (−1) or join (+1), with the machine and the pause of all."""
    pause_s = costs.reconfigure_s + costs.step_s / 2
    rejoins_at: dict[int, float] = {}
    for failure in failures:
        if failure.at_s < rejoins_at.get(failure.machine, 0.0):  # The machine had not joined again.
            changes = [change for change in changes if change[1:3] != (failure.machine, 1) or change[0] < failure.at_s]
        else:
            changes.append((failure.at_s, failure.machine, -1, pause_s))
        joins_at = failure.at_s + failure.down_s + costs.recovery_s
        rejoins_at[failure.machine] = joins_at
        changes.append((joins_at, failure.machine, 1, costs.reconfigure_s))
    useful_s = 0.0
    active = machines
    now = 0.0
    paused_until = 0.0
    for change_at, _, change, pause in [*sorted(changes), (horizon_s, 0, 0, 0.0)]:
        at_s = min(change_at, horizon_s)
        useful_s += active * max(0.0, at_s - max(now, paused_until))
        now = at_s
        active += change
        paused_until = max(paused_until, at_s + pause)
    return useful_s / (machines * horizon_s)


def rivals_goodput(
    failures: Sequence[MachineFailure], machines: int, horizon_s: float, costs: RivalCosts
) -> dict[str, float]:
    """Goodput of each model under the same failures, by its name; for the arguments, see `ddp_goodput`."""
    mean_s = mean_time_between(failures, horizon_s)
    young_s = young_interval(costs.checkpoint_s, mean_s)
    daly_s = daly_interval(costs.checkpoint_s, mean_s)
    return {
        "DDP, checkpoints at Young's interval": ddp_goodput(failures, machines, horizon_s, costs, young_s),
        "DDP, checkpoints at Daly's interval": ddp_goodput(failures, machines, horizon_s, costs, daly_s),
        "Ray Train, elastic": elastic_goodput(failures, machines, horizon_s, costs, daly_s),
        "torchft": torchft_goodput(failures, machines, horizon_s, costs),
    }


class FailureLog:
    """Host of machines that do nothing: keeps what strikes them.

    Args:
        scenario: gives machines and failures.

    """

    def __init__(self, scenario: Scenario) -> None:
        self._clock = VirtualClock()
        self._failures: list[MachineFailure] = []
        """Failures whose lengths are known."""
        self._away_since: dict[int, float] = {}
        """Times from which machines are away, by number."""
        self._schedule = FailureSchedule(scenario, machines_of(scenario), self)

    def record(self, horizon_s: float) -> list[MachineFailure]:
        """Let time pass up to a horizon; return the failures before it in the order of their times."""
        self._schedule.start()
        while self._clock.advance(horizon_s):
            pass
        for machine, began_at in self._away_since.items():
            self._log(machine, began_at, horizon_s)
        return sorted(self._failures, key=lambda failure: (failure.at_s, failure.machine))

    def _log(self, machine: int, began_at: float, until: float) -> None:
        self._failures.append(MachineFailure(began_at, machine, until - began_at))

    # ── what happens to machines ──────────────────────────────────────────────────────────────────────────────────

    @property
    def now(self) -> float:
        """Present time in seconds."""
        return self._clock.now

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self._clock.later(seconds, action)

    def kill(self, machine: Machine) -> None:
        """Log the end of a process."""
        self._log(machine.number, self.now, self.now)

    def hang(self, machine: Machine) -> None:
        """Log a hang as the end of the process, as if it were noticed at once."""
        self.kill(machine)

    def partition(self, machine: Machine, seconds: float) -> None:
        """Log the cut of a link as an absence."""
        self._log(machine.number, self.now, self.now + seconds)
        machine.absences |= {CUT}
        self.later(seconds, lambda: self.join(machine, CUT))

    def preempt(self, machine: Machine, notice_s: float, reason: str) -> None:
        """Take the machine away after the notice, unless it is back by then."""
        machine.absences |= {reason}

        def leave() -> None:
            if reason in machine.absences:
                self.leave(machine, reason)

        self.later(notice_s, leave)

    def leave(self, machine: Machine, reason: str) -> None:
        """Begin an absence."""
        machine.absences |= {reason}
        self._away_since.setdefault(machine.number, self.now)

    def join(self, machine: Machine, reason: str) -> None:
        """End the absence for a reason; the machine is back once there is no other."""
        machine.absences -= {reason}
        away_since = None if machine.absences else self._away_since.pop(machine.number, None)
        if away_since is not None:
            self._log(machine.number, away_since, self.now)


def failure_trace(scenario: Scenario, horizon_s: float) -> list[MachineFailure]:
    """Failures that a simulated run of a scenario meets up to a horizon, in the order of their times."""
    return FailureLog(scenario).record(horizon_s)


@dataclass(frozen=True, slots=True)
class RivalComparison:
    """A simulated run, and the failures that it has met."""

    scenario: Scenario
    result: SimulationResult
    costs: RivalCosts
    failures: tuple[MachineFailure, ...]

    def rivals(self, restart_s: float) -> dict[str, float]:
        """Goodput of each model, by its name, with another time of a restart."""
        costs = replace(self.costs, restart_s=restart_s)
        return rivals_goodput(self.failures, self.scenario.machine_count, self.result.time_s, costs)

    def as_json(self) -> dict[str, Any]:
        """The run's figures, with the models' goodput and the times that they take as given."""
        return {
            **self.result.as_json(),
            "failures": len(self.failures),
            "rivals": self.rivals(self.costs.restart_s),
            "rival_costs": asdict(self.costs),
        }


def compare(scenario: Scenario, result: SimulationResult, costs: RivalCosts) -> RivalComparison:
    """Compare a scenario's run with the models, under the failures up to its last commit."""
    return RivalComparison(scenario, result, costs, tuple(failure_trace(scenario, result.time_s)))


def comparison_lines(comparison: RivalComparison) -> Iterator[str]:
    """Lines of a table of goodput by the time of a restart, and of what the models assume."""
    costs = comparison.costs
    horizon_s = comparison.result.time_s
    mean_s = mean_time_between(comparison.failures, horizon_s)
    machines = comparison.scenario.machine_count
    failures = len(comparison.failures)
    yield f"{machines} machines, failures in {duration(horizon_s)}: {failures}, one in {duration(mean_s)}"
    restarts_s = sorted({*RESTARTS_S, costs.restart_s})
    columns = {restart_s: comparison.rivals(restart_s) for restart_s in restarts_s}
    heads_text = "".join(f"{duration(restart_s):>9}" for restart_s in restarts_s)
    yield f"{'goodput, by the time of a restart':<38}{heads_text}"
    result = comparison.result
    yield f"{OURS:<38}{f'{result.goodput:>9.3f}' * len(restarts_s)}"
    for name in columns[costs.restart_s]:
        cells = "".join(f"{column[name]:>9.3f}" for column in columns.values())
        yield f"{name:<38}{cells}"
    if result.failure is not None:
        yield f"{OURS}: ended after {counted(result.rounds, 'round')}: {result.failure}"
    yield f"models write a checkpoint in {costs.checkpoint_s:g} s and load it in {costs.reload_s:g} s"
    for assumption in ASSUMPTIONS:
        yield f"assumed of {assumption}"
