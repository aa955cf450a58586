"""Asynchronous copies to a mirror, on a thread: only of the newest commit. A hanging copy delays nothing."""

from __future__ import annotations

import threading
import time

from hypha_ray.store.mirror import Mirror

WAIT_S = 1.0
"""Longest time in seconds that a commit waits for its copy."""
DEADLINE_S = 30.0
"""Seconds, in addition to one for each megabyte, after which a copy is reported as late."""
BYTES_PER_S = 1_000_000


class Courier:
    """Copies commits to a mirror.

    Of the commits that arrive during a copy, only the newest is copied next, with all records before it. A problem is
    reported once, until a copy succeeds.

    Args:
        mirror: destination.
        wait_s: longest wait of `news`, in seconds.
        deadline_s: time for a copy of no bytes, in seconds.

    """

    def __init__(self, mirror: Mirror, wait_s: float = WAIT_S, deadline_s: float = DEADLINE_S) -> None:
        self._mirror = mirror
        self._wait_s = wait_s
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._next: tuple[int, int] | None = None
        """Round of the next commit to copy, and number of snapshots to keep at the mirror."""
        self._busy: tuple[int, float] | None = None
        """Round of the commit being copied, and the time after which it is late."""
        self._problem: str | None = None
        """A problem that isn't reported yet."""
        self._ill = False
        """Whether a problem was reported, and no copy has succeeded since."""
        self._patient = True
        """Whether the current copy hasn't yet exceeded the wait of a commit."""
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> int | None:
        """Round of the commit whose files are being read."""
        with self._changed:
            return None if self._busy is None else self._busy[0]

    def send(self, round: int, keep: int) -> None:
        """Copy a commit in the background; its snapshot must stay while the round is `busy`.

        Args:
            round: number of the commit's round.
            keep: number of snapshots to keep at the mirror.

        """
        with self._changed:
            self._next = round, keep
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()

    def news(self) -> str | None:
        """Wait briefly for the current copy, unless it is a slow one; returns a problem that isn't reported yet."""
        with self._changed:
            self._patient = self._patient and self._changed.wait_for(self._idle, self._wait_s)
            return self._told()

    def settle(self) -> str | None:
        """Wait until all copies are made, or the current one is late; returns a problem that isn't reported yet."""
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
            self._problem = (
                f"the copy of round {self._busy[0] + 1} to {self._mirror.place} doesn't end; training goes on"
            )
        text = self._problem
        self._problem = None
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
                self._busy = None
                self._patient = True
                self._ill &= problem is not None
                self._problem = None if self._ill else problem
                self._changed.notify_all()


def deliver(mirror: Mirror) -> str | None:
    """Copy a run's results; returns a problem, such as a copy that doesn't end, or None."""
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(mirror.complete()), name="mirror", daemon=True)
    thread.start()
    thread.join(DEADLINE_S + mirror.size() / BYTES_PER_S)
    return found[0] if found else f"the copy of the run's results to {mirror.place} doesn't end"
