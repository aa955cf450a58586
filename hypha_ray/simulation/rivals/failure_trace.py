"""Trace of a scenario's failures without any training: what strikes the machines, and for how long they are away."""

from __future__ import annotations

from collections.abc import Callable

from hypha_ray.simulation.failures import FailureSchedule
from hypha_ray.simulation.machines import Machine, machines_of
from hypha_ray.simulation.rivals.models import MachineFailure
from hypha_ray.simulation.scenario import Scenario
from hypha_ray.simulation.world import VirtualClock

CUT = "cut"
"""Reason of the absence of a machine whose link is cut."""


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
        for number, since in self._away_since.items():
            self._log(number, since, horizon_s)
        return sorted(self._failures, key=lambda failure: (failure.at_s, failure.machine))

    def _log(self, number: int, since: float, until: float) -> None:
        self._failures.append(MachineFailure(since, number, until - since))

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
        since = None if machine.absences else self._away_since.pop(machine.number, None)
        if since is not None:
            self._log(machine.number, since, self.now)


def failure_trace(scenario: Scenario, horizon_s: float) -> list[MachineFailure]:
    """Failures that a simulated run of a scenario meets up to a horizon, in the order of their times."""
    return FailureLog(scenario).record(horizon_s)
