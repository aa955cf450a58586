"""A simulated worker whose figures are those of its machine: real times of batches, sizes of payloads, waits.

Batches up to the next report or the end of the plan are one action on the clock. An order that changes the plan first
counts those that have ended, so that results are as if each batch were an action.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from hypha_ray.scheduler import messages as c
from hypha_ray.simulation.machines import Machine
from hypha_ray.simulation.worker import SimulatedWorker, Surroundings
from hypha_ray.simulation.world import PULSES, VirtualClock
from hypha_ray.types import Alive, Event, Left, Merged, Plan, Source

SPARED_PULSES = PULSES - 2
"""Signs of life after one that are counted together with the next one, before the end of the lease."""
LATENESS = 0.125
"""Part of the time between two signs of life after which one is counted."""


Batch: TypeAlias = tuple[float, int, float]
"""A batch that will have been trained on: time of its end, samples and seconds."""


class Accounts(Surroundings, Protocol):
    """World that counts a worker's time, and knows the sizes of payloads."""

    clock: VirtualClock
    """Clock of all actions."""

    def payload_bytes(self, round: int) -> int:
        """Bytes of a worker's delta of a round."""

    def renew_lease(self, worker: FleetWorker, at: float) -> bool:
        """Renew a worker's lease, which is all that a sign of life does; False if its machine's link was cut then."""


class FleetWorker(SimulatedWorker):
    """Counts its time in batches and at the barrier, in seconds.

    Args:
        source: number and incarnation.
        world: gives times and takes events.
        machine: its machine.

    """

    __slots__ = (
        "_accounts",
        "_batch_began_at",
        "_batches",
        "_clock",
        "_delta_s",
        "_idle_since",
        "_pulse_at",
        "_unreported_s",
        "batches_s",
        "began_at",
        "machine",
        "sign_of_life",
        "waited_s",
    )

    def __init__(self, source: Source, world: Accounts, machine: Machine) -> None:
        super().__init__(source, world)
        self._accounts = world
        self._clock = world.clock
        self.machine = machine
        self.sign_of_life = Alive(source)
        self.began_at = world.clock.now
        self.batches_s = 0.0
        """Time of batches that have ended."""
        self.waited_s = 0.0
        """Time at the barrier."""
        self._batch_began_at: float | None = None
        """Beginning of the batches that are one action; None between them."""
        self._batches: list[Batch] = []
        """Batches that are one action, or the one that is under way."""
        self._idle_since: float | None = None
        """Time at which it began to wait for new weights; None while it doesn't."""
        self._unreported_s = 0.0
        """Time of batches since the last report."""
        self._delta_s = 0.0
        """Time of batches since the last delta."""
        self._pulse_at = self.began_at
        """Time of the next sign of life that the scheduler hasn't got."""

    def time_in_batches(self) -> float:
        """Time of all batches, with the part of the present one that has passed."""
        if self._batch_began_at is None:
            return self.batches_s
        return self.batches_s + self._clock.now - self._batch_began_at

    def stop(self) -> None:
        """End at once, in the middle of a batch if there is one."""
        if self.alive:
            self.catch_up_pulses()
        self.batches_s = self.time_in_batches()
        self._batch_began_at = None
        self.alive = False

    def go(self) -> None:
        """Do all that takes no time; from now on it waits unless it is busy."""
        was_alive = self.alive
        super().go()
        if was_alive and not self.alive:
            self.catch_up_pulses()
        is_waiting = self._busy is None and not self._merged and self.alive
        if not is_waiting:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._clock.now

    def order(self, command: c.Order) -> None:
        """Accept an order."""
        if isinstance(command, c.Assign | c.Drain):
            self._count_ended_batches()
        super().order(command)

    def leave(self, reason: str) -> None:
        """End the batch, deliver what is done, and leave."""
        self._count_ended_batches()
        super().leave(reason)

    def _train(self, plan: Plan) -> None:
        """Train until a report is due or the plan is done."""
        assert self._longest is not None
        target = plan.samples
        if target > self._longest.samples:
            self._longest = plan
        now = ends_at = self._clock.now
        samples = self._samples
        seconds = self._seconds
        self._batches = []
        is_report_due = False
        while samples < target and not is_report_due:
            size = min(plan.batch_size, target - samples)
            batch_s = self.machine.batch_s(ends_at)
            ends_at += batch_s
            samples += size
            seconds += batch_s
            self._batches.append((ends_at, size, batch_s))
            batches = (samples - self._reported) / size
            is_report_due = self._accounts.report_due(seconds, batches, (target - samples) / size)
        self._spend_batch(ends_at - now, self._end_batches)

    def _end_batches(self) -> None:
        _, samples, seconds = self._batches.pop()
        self._count(self._batches)
        self._batches = []
        self._trained(samples, seconds)

    def _count_ended_batches(self) -> None:
        """Count the batches that have ended by now; the one under way becomes an action of its own."""
        if len(self._batches) < 2 or not self.alive:
            return
        now = self._clock.now
        ended = [batch for batch in self._batches if batch[0] <= now]
        if len(ended) == len(self._batches):
            return
        under_way = self._batches[len(ended)]
        self._batches = [under_way]
        if ended:
            self._count(ended)
            self._count_time(ended[-1][0])
        self._spend(under_way[0] - now, self._end_batches)

    def _count(self, batches: list[Batch]) -> None:
        for _, samples, seconds in batches:
            self._samples += samples
            self._seconds += seconds

    def _count_time(self, now: float) -> None:
        """Count the time in batches until now, where another one begins."""
        assert self._batch_began_at is not None
        seconds = now - self._batch_began_at
        self.batches_s += seconds
        self._unreported_s += seconds
        self._delta_s += seconds
        self._batch_began_at = now

    def _pulse(self) -> None:
        """Give the signs of life that are due; they are no actions of their own as long as the lease surely lasts."""
        if self.alive:
            spared = SPARED_PULSES if self.catch_up_pulses() else 0
            next_s = (spared + LATENESS) * self._accounts.pulse_s()
            self._accounts.later(self._pulse_at - self._clock.now + next_s, self._pulse)

    def catch_up_pulses(self) -> bool:
        """Have the scheduler get all signs of life up to now; False if the last one was lost."""
        now = self._clock.now
        last_at: float | None = None
        while self._pulse_at <= now:
            last_at = self._pulse_at
            self._pulse_at += self._accounts.pulse_s()
        return last_at is not None and self._accounts.renew_lease(self, last_at)

    def _spend_batch(self, seconds: float, then: Callable[[], None]) -> None:
        self._batch_began_at = self._clock.now
        super()._spend_batch(seconds, then)

    def _end_if_busy(self, token: object, then: Callable[[], None]) -> None:
        if self._busy is token and self.alive and self._batch_began_at is not None:
            self._count_time(self._clock.now)
            self._batch_began_at = None
        super()._end_if_busy(token, then)

    def _send(self, event: Event) -> None:
        match event:
            case Left():
                self.stop()
            case Merged() if self._idle_since is not None:
                waited_s = self._clock.now - self._idle_since
                self._idle_since = self._clock.now
                if event.theta_sha256 is None:  # The first weights are waited for at no barrier.
                    self.waited_s += waited_s
                    event = Merged(event.source, event.version, event.theta_sha256, waited_s)
        super()._send(event)

    def _reported_s(self, batches: int) -> float:
        """Seconds of all batches since the last report, as measured."""
        self.machine.skip_batch(self._clock.now)
        seconds = self._unreported_s
        self._unreported_s = 0.0
        return seconds

    def _delivered_s(self, batches: int) -> float:
        """Seconds of all batches since the last delta, as measured."""
        self.machine.skip_batch(self._clock.now)
        seconds = self._delta_s
        self._delta_s = 0.0
        return seconds

    def _payload_bytes(self) -> int:
        """Bytes of a delta of the round."""
        return self._accounts.payload_bytes(self.round)
