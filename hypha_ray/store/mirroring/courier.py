"""Copies on their way to a mirror: on a thread of their own, the newest commit only. One that hangs delays nothing."""

from __future__ import annotations

import threading
import time

from hypha_ray.store.mirroring.mirror import Mirror

WAIT_S = 1.0
"""Seconds that a commit waits for its copy, for most are made in no time; then it is answered without."""
DEADLINE_S = 30.0
"""Seconds that a copy may take beside one for each megabyte, before it is told of."""
BYTES_PER_S = 1_000_000


class Courier:
    """Takes commits to a mirror.

    While one is on its way, the next ones wait, and only the newest of them is taken: it brings all records before it.
    What goes wrong is told once, until something has arrived.

    Args:
        mirror: where to.
        wait_s: how long `news` waits.
        deadline_s: how long a copy without any bytes may take.

    """

    def __init__(self, mirror: Mirror, wait_s: float = WAIT_S, deadline_s: float = DEADLINE_S) -> None:
        self._mirror, self._wait_s, self._deadline_s = mirror, wait_s, deadline_s
        self._changed = threading.Condition()
        self._next: tuple[int, int] | None = None
        """Round of the commit that is to be taken next, and how many snapshots stay there."""
        self._busy: tuple[int, float] | None = None
        """Round of the one that is on its way, and when it is late."""
        self._problem: str | None = None
        """A problem that isn't told yet."""
        self._ill = False
        """Something is told, and nothing has arrived since."""
        self._patient = True
        """Nothing was on its way for longer than a commit waits."""
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> int | None:
        """Round of the commit whose files are being read."""
        with self._changed:
            return None if self._busy is None else self._busy[0]

    def send(self, round: int, keep: int) -> None:
        """Have a commit taken there, whose snapshot is to stay until it isn't `busy` any more.

        Args:
            round: its number.
            keep: newest snapshots that stay there.

        """
        with self._changed:
            self._next = round, keep
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()

    def news(self) -> str | None:
        """Wait a moment for what is on its way, if that isn't slow; returns a problem that isn't told yet."""
        with self._changed:
            self._patient = self._patient and self._changed.wait_for(self._idle, self._wait_s)
            return self._told()

    def settle(self) -> str | None:
        """Wait until everything is there, or what is on its way is late; returns a problem that isn't told yet."""
        with self._changed:
            while not self._idle() and not self._late(time.monotonic()):
                self._changed.wait(self._wait_s)
            return self._told()

    def _idle(self) -> bool:
        return self._next is None and self._busy is None

    def _late(self, now: float) -> bool:
        return self._busy is not None and now >= self._busy[1]

    def _told(self) -> str | None:
        if self._busy is not None and self._late(time.monotonic()) and not self._ill:
            self._problem = f"the copy of round {self._busy[0]} to {self._mirror.place} doesn't end; training goes on"
        text, self._problem = self._problem, None
        self._ill |= text is not None
        return text

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                assert self._next is not None
                (round, keep), self._next = self._next, None
                limit_s = self._deadline_s + self._mirror.size(round) / BYTES_PER_S
                self._busy = round, time.monotonic() + limit_s
            problem = self._mirror.push(round, keep)
            with self._changed:
                self._busy, self._patient = None, True
                self._ill &= problem is not None
                self._problem = None if self._ill else problem
                self._changed.notify_all()


def deliver(mirror: Mirror) -> str | None:
    """Copy what there is at the end of a run beside commits; returns what went wrong, also that it doesn't end."""
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(mirror.complete()), name="mirror", daemon=True)
    thread.start()
    thread.join(DEADLINE_S + mirror.size() / BYTES_PER_S)
    return found[0] if found else f"the copy of the run's results to {mirror.place} doesn't end"
