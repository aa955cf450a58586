"""Waits of the inner loop for the control thread, which may interrupt them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition


class Closed(Exception):
    """The worker is being stopped; its results are dropped."""


class Retired(Closed):
    """The worker is leaving; its result of this round is still wanted."""


class ProcessLostError(Exception):
    """Another process of the worker has died or is silent; the worker is lost with it."""


class Interruptible:
    """State that one thread writes and another one waits for, until it is interrupted."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._interruption: type[Closed] | None = None

    def close(self, why: type[Closed] = Closed) -> None:
        """Interrupt this wait of the reader and all later ones with `why`; the first call decides."""
        with self._changed:
            self._interruption = self._interruption or why
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `Closed` or `Retired` if the reader has been interrupted."""
        if self._interruption is not None:
            raise self._interruption

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait, with the lock held, for something to be ready, or for an interruption."""
        self._changed.wait_for(lambda: self._interruption is not None or is_ready())
        self.check()
