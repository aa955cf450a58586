"""Asynchronous copies to a mirror, on a thread: only of the newest commit. A hanging copy delays nothing."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from hypha_ray.store.mirror import Mirror

WAIT_S = 1.0
"""Longest time in seconds that a commit waits for its copy."""
DEADLINE_S = 30.0
"""Seconds, in addition to one for each megabyte, after which a copy is reported as late."""
BYTES_PER_S = 1_000_000


class _CopyRequest(NamedTuple):
    """Next commit to copy, and number of snapshots to keep at the mirror."""

    round: int
    keep: int


class _Copy(NamedTuple):
    """Commit that is being copied, and monotonic time after which the copy is late."""

    round: int
    late_at: float


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
        self._next: _CopyRequest | None = None
        self._copy: _Copy | None = None
        self._problem: str | None = None
        """A problem that isn't reported yet."""
        self._has_reported = False
        """Whether a problem was reported, and no copy has succeeded since."""
        self._may_wait = True
        """Whether the current copy hasn't yet exceeded the wait of a commit."""
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> int | None:
        """Round of the commit whose files are being read."""
        with self._changed:
            return None if self._copy is None else self._copy.round

    def send(self, round: int, keep: int) -> None:
        """Copy a commit in the background; its snapshot must stay while the round is `busy`.

        Args:
            round: number of the commit's round.
            keep: number of snapshots to keep at the mirror.

        """
        with self._changed:
            self._next = _CopyRequest(round, keep)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
            self._thread.start()

    def news(self) -> str | None:
        """Wait briefly for the current copy, unless it is a slow one; returns a problem that isn't reported yet."""
        with self._changed:
            self._may_wait = self._may_wait and self._changed.wait_for(self._is_idle, self._wait_s)
            return self._take_problem()

    def settle(self) -> str | None:
        """Wait until all copies are made, or the current one is late; returns a problem that isn't reported yet."""
        with self._changed:
            while not self._is_idle() and not self._is_late(time.monotonic()):
                self._changed.wait(self._wait_s)
            return self._take_problem()

    def _is_idle(self) -> bool:
        return self._next is None and self._copy is None

    def _is_late(self, now: float) -> bool:
        return self._copy is not None and now >= self._copy.late_at

    def _take_problem(self) -> str | None:
        """Return the problem that isn't reported yet, and count it as reported."""
        if self._copy is not None and self._is_late(time.monotonic()) and not self._has_reported:
            round_number = self._copy.round + 1
            self._problem = f"the copy of round {round_number} to {self._mirror.address} doesn't end; training goes on"
        problem = self._problem
        self._problem = None
        self._has_reported |= problem is not None
        return problem

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                assert self._next is not None
                request = self._next
                self._next = None
                limit_s = _copy_time_s(self._mirror.size(request.round), self._deadline_s)
                self._copy = _Copy(request.round, time.monotonic() + limit_s)
            problem = self._mirror.push(request.round, request.keep)
            with self._changed:
                self._copy = None
                self._may_wait = True
                self._has_reported &= problem is not None
                self._problem = None if self._has_reported else problem
                self._changed.notify_all()


def deliver(mirror: Mirror) -> str | None:
    """Copy a run's results; returns a problem, such as a copy that doesn't end, or None."""
    answers: list[str | None] = []

    def copy() -> None:
        answers.append(mirror.complete())

    thread = threading.Thread(target=copy, name="mirror", daemon=True)
    thread.start()
    thread.join(_copy_time_s(mirror.size()))
    if not answers:
        return f"the copy of the run's results to {mirror.address} doesn't end"
    return answers[0]


def _copy_time_s(size_bytes: int, base_s: float = DEADLINE_S) -> float:
    return base_s + size_bytes / BYTES_PER_S
