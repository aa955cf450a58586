"""Strikes when the time has come, and keeps a record of the victims."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from chaoslab.arena import Arena
from chaoslab.figures.recovery import Kill, newest, progress_at
from chaoslab.job import Driver
from chaoslab.processes import born
from chaoslab.schedule import Strike
from chaoslab.watch import Watch


@dataclass(frozen=True, slots=True)
class Prey:
    """A process that can be struck; a node by the raylet's process id."""

    name: str
    pid: int
    node: str | None = None
    worker: int | None = None


class Hunter:
    """Carries out a sequence of strikes.

    Args:
        arena: where the prey lives.
        driver: the driver's process, which is started again when it was struck.
        watch: what is seen of the run.
        strikes: what to do.
        begin_s: monotonic time from which on the first interval is counted.
        patient: strike only once the last loss has healed, and wait for prey; otherwise a strike without a victim is a
            miss.

    """

    def __init__(
        self, arena: Arena, driver: Driver, watch: Watch, strikes: Iterator[Strike], begin_s: float, patient: bool
    ) -> None:
        self._arena = arena
        self._driver = driver
        self._watch = watch
        self._strikes = strikes
        self._patient = patient
        self.kills: list[Kill] = []
        self.missed: list[str] = []
        """Roles without a live process when they were to be struck."""
        self._stopped: dict[int, tuple[str, str | None]] = {}
        """Name and start time of stopped processes, by process id."""
        self._next_s = begin_s
        """Monotonic time of the next strike."""
        self._next: Strike | None = None
        self._plan_next(begin_s)

    def turn(self, now: float) -> None:
        """Strike if it is time to."""
        if self._next is None or now < self._next_s:
            return
        if self._patient and not self._is_healed():
            return
        strike = self._next
        prey = strike.choose(self._living(strike.role))
        if prey is None and self._patient:
            return
        if prey is None:
            self.missed.append(strike.role)
        else:
            self.kills.append(self._hit(strike, prey))
        self._plan_next(now if self._patient else self._next_s)

    def heal_s(self, kill: Kill) -> float | None:
        """Seconds from a kill to the next progress; None: it hasn't come."""
        commits = list(self._watch.commits.values())
        at_s = progress_at(kill, self._watch.steps, self._watch.events, commits)
        return None if at_s is None else at_s - kill.at_s

    def frozen(self) -> list[str]:
        """Names of processes that were stopped and are still there."""
        names = []
        for pid, (name, birth) in self._stopped.items():
            if birth is not None and born(pid) == birth:
                names.append(name)
        return names

    def _plan_next(self, since_s: float) -> None:
        self._next = next(self._strikes, None)
        if self._next is not None:
            self._next_s = since_s + self._next.after_s

    def _is_healed(self) -> bool:
        return not self.kills or self.heal_s(self.kills[-1]) is not None

    def _living(self, role: str) -> list[Prey]:
        if role == "driver":
            return [Prey("driver", self._driver.pid)]
        name = "worker" if role == "node" else role
        living = []
        for actor in self._arena.actors():
            has_role = actor.name == name or actor.name.startswith(f"{name}-")
            if not has_role or not self._is_well(actor.pid):
                continue
            worker = int(actor.name.removeprefix("worker-")) if name == "worker" else None
            if role != "node":
                living.append(Prey(actor.name, actor.pid, None, worker))
                continue
            raylet = self._arena.raylet(actor.node)
            if raylet is not None:
                living.append(Prey(f"node of {actor.name}", raylet, actor.node, worker))
        return living

    def _is_well(self, pid: int) -> bool:
        """Neither dead, of which Ray may not know yet, nor stopped by us."""
        birth = born(pid)
        return birth is not None and self._stopped.get(pid, ("", None))[1] != birth

    def _hit(self, strike: Strike, prey: Prey) -> Kill:
        signal_sent = signal.SIGSTOP if strike.stop else signal.SIGKILL
        after = newest(self._watch.events, strike.role, prey.worker)
        at_s = time.monotonic()
        if strike.role == "driver":
            self._driver.kill()
            self._driver.start()
        elif prey.node is not None:
            self._arena.kill_node(prey.node)
        else:
            if strike.stop:
                self._stopped[prey.pid] = (prey.name, born(prey.pid))
            with suppress(ProcessLookupError):  # It has died by itself a moment ago.
                os.kill(prey.pid, signal_sent)
        return Kill(at_s, strike.role, prey.name, signal_sent.name, prey.pid, prey.worker, after)
