"""Event loop of this process, in a thread of its own, for coroutines that threads wait for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Background:
    """Loop that begins with the first coroutine, and runs as long as the process."""

    def __init__(self) -> None:
        self._beginning = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop."""
        with self._beginning:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True).start()
            return self._loop


_background = _Background()


def _begin_anew() -> None:
    """Forget the parent's loop in a forked process, which hasn't its thread."""
    global _background  # noqa: PLW0603
    _background = _Background()


os.register_at_fork(after_in_child=_begin_anew)


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, or raise its error. Threads may wait for many at a time.

    Unlike `asyncio.run`, this doesn't wait for threads in which names of hosts are still looked up.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _background.loop())
    try:
        return future.result()
    finally:
        future.cancel()
