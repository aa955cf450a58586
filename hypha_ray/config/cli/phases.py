"""Phases of a command: a line on standard error for each, with the seconds since the command began.

[   0.4s] loading libraries
[   3.1s] checking model and data
[  63.1s] still checking model and data
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

SILENCE_S = 60.0
"""Longest silence of a command that is at work, in seconds, if its output isn't a terminal."""
SHORT_S = 0.8
"""Seconds that a phase has to last before it is said: a command that ends at once prints only its result or error."""


class Heartbeat:
    """Calls a function after every silence of a given length, from a thread of its own.

    Args:
        speak: writes a line.
        silence_s: length of a silence in seconds.

    """

    def __init__(self, speak: Callable[[], None], silence_s: float = SILENCE_S) -> None:
        self._speak = speak
        self._silence_s = silence_s
        self._wait_s = silence_s
        """Length of the silence that lasts."""
        self._interrupted = threading.Event()
        """Set by a line of other code, and by the end."""
        self._stopped = False
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def restart(self, wait_s: float | None = None) -> None:
        """Begin the silence anew; this one may be of another length."""
        self._wait_s = self._silence_s if wait_s is None else wait_s
        self._interrupted.set()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped = True
        self._interrupted.set()

    def _run(self) -> None:
        while not self._stopped:
            if self._interrupted.wait(self._wait_s):
                self._interrupted.clear()
            else:
                self._wait_s = self._silence_s
                self._speak()


class Phases:
    """Says what a command does, unless that is done at once, and from time to time that it still does it.

    Args:
        stream: where to write; default: standard error.
        began_s: monotonic time at which the command began; default: when this process did.
        clock: monotonic seconds.
        silence_s: seconds after which a phase that goes on is said again.
        short_s: seconds after which a phase is said; those of the first one count from the beginning of the command.

    """

    def __init__(
        self,
        stream: TextIO | None = None,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = SILENCE_S,
        short_s: float = SHORT_S,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._silence_s = silence_s
        self._short_s = short_s
        self.began_s = process_began_s() if began_s is None else began_s
        self._text = ""
        self._phase_s = self.began_s
        """Time at which the current phase began."""
        self._is_said = False
        self._heartbeat: Heartbeat | None = None

    def begin(self, text: str) -> None:
        """Say that a phase begins, which ends the one before."""
        self._text, self._is_said, now = text, False, self._clock()
        is_first = self._heartbeat is None
        self._phase_s = now
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(self._speak, self._silence_s)
        self._heartbeat.restart(max(0.0, self._short_s - (now - self.began_s if is_first else 0.0)))

    def update(self, text: str) -> None:
        """Change the words for the phase that goes on, which are said after a silence."""
        self._text = text

    def end(self) -> None:
        """End the last phase without a word."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _speak(self) -> None:
        if self._is_said:
            text = line(self._clock() - self.began_s, f"still {self._text}")
        else:
            text = line(self._phase_s - self.began_s, self._text)
        self._is_said = True
        with suppress(OSError, ValueError):  # Its reader is gone, or the stream is closed.
            print(text, file=self._stream or sys.stderr, flush=True)


def line(seconds: float, text: str) -> str:
    """Write a phase with its time."""
    return f"[{seconds:6.1f}s] {text}"


def process_began_s() -> float:
    """Monotonic time at which this process began, as far as the system tells; otherwise the time of the call."""
    now = time.monotonic()
    with suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return now - max(0.0, age_s)
    return now
