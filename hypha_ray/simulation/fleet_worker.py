"""A simulated worker whose figures are those of its machine: real times of batches, sizes of payloads, waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from hypha_ray.simulation.machines import Machine
from hypha_ray.simulation.worker import SimulatedWorker, Surroundings
from hypha_ray.types import Delta, Event, Left, Merged, Report, Source


class Accounts(Surroundings, Protocol):
    """World that counts a worker's time, and knows the sizes of payloads."""

    @property
    def now(self) -> float:
        """Present time in seconds."""

    def payload_bytes(self, round: int) -> int:
        """Bytes of a worker's delta of a round."""

    def renew_lease(self, worker: FleetWorker) -> None:
        """Renew a worker's lease, which is all that a sign of life does, unless its machine's link is cut."""


class FleetWorker(SimulatedWorker):
    """Counts its time in batches and at the barrier, in seconds.

    Args:
        source: number and incarnation.
        world: gives times and takes events.
        machine: its machine.

    """

    def __init__(self, source: Source, world: Accounts, machine: Machine) -> None:
        super().__init__(source, world)
        self._accounts = world
        self.machine = machine
        self.began_at = world.now
        self.batches_s = 0.0
        """Time of batches that have ended."""
        self.waited_s = 0.0
        """Time at the barrier."""
        self._batch_began_at: float | None = None
        """Beginning of the present batch; None between batches."""
        self._idle_since: float | None = None
        """Time at which it began to wait for new weights; None while it doesn't."""
        self._unreported_s = 0.0
        """Time of batches since the last report."""
        self._delta_s = 0.0
        """Time of batches since the last delta."""

    def time_in_batches(self) -> float:
        """Time of all batches, with the part of the present one that has passed."""
        if self._batch_began_at is None:
            return self.batches_s
        return self.batches_s + self._accounts.now - self._batch_began_at

    def stop(self) -> None:
        """End at once, in the middle of a batch if there is one."""
        self.batches_s = self.time_in_batches()
        self._batch_began_at = None
        self.alive = False

    def go(self) -> None:
        """Do all that takes no time; from now on it waits unless it is busy."""
        super().go()
        is_waiting = self._busy is None and not self._merged and self.alive
        if not is_waiting:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._accounts.now

    def _pulse(self) -> None:
        if self.alive:
            self._accounts.renew_lease(self)
            self._accounts.later(self._accounts.pulse_s(), self._pulse)

    def _spend_batch(self, seconds: float, then: Callable[[], None]) -> None:
        self._batch_began_at = self._accounts.now
        super()._spend_batch(seconds, then)

    def _end_if_busy(self, token: object, then: Callable[[], None]) -> None:
        if self._busy is token and self.alive and self._batch_began_at is not None:
            seconds = self._accounts.now - self._batch_began_at
            self.batches_s += seconds
            self._unreported_s += seconds
            self._delta_s += seconds
            self._batch_began_at = None
        super()._end_if_busy(token, then)

    def _send(self, event: Event) -> None:
        match event:
            case Report():
                event = replace(event, seconds=self._unreported_s)
                self._unreported_s = 0.0
            case Delta(round=number):
                event = replace(event, payload_bytes=self._accounts.payload_bytes(number), train_s=self._delta_s)
                self._delta_s = 0.0
            case Left():
                self.stop()
            case Merged() if self._idle_since is not None:
                waited_s = self._accounts.now - self._idle_since
                self._idle_since = self._accounts.now
                if event.theta_sha256 is None:  # The first weights are waited for at no barrier.
                    self.waited_s += waited_s
                    event = replace(event, waited_s=waited_s)
        super()._send(event)
