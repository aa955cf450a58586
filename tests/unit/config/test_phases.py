"""Lines that say what a command is doing, and that it still does."""

import io
import subprocess
import sys
import threading
import time
from typing import TextIO

from hypha_ray.config.entry_point import Phases


class Watched(io.StringIO):
    """A stream that sets `full` once it has this many lines."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines, self.full = lines, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= self.lines:
            self.full.set()
        return written


def phases_in(stream: TextIO, silence_s: float, short_s: float = 0.0) -> Phases:
    return Phases(stream, began_s=100.0, clock=lambda: 104.25, silence_s=silence_s, short_s=short_s)


def test_phase_is_a_line_with_the_time_since_the_command_began() -> None:
    stream = Watched(lines=1)
    phases = phases_in(stream, 60.0)
    phases.begin("loading libraries")
    assert stream.full.wait(60)
    phases.end()
    assert stream.getvalue().splitlines() == ["[   4.2s] loading libraries"]


def test_first_phase_of_a_command_that_began_long_ago_is_said_at_once_and_short_ones_are_not() -> None:
    stream = Watched(lines=1)
    phases = phases_in(stream, 60.0, short_s=4.0)
    phases.begin("loading libraries")
    assert stream.full.wait(60)
    phases.begin("reading the run")
    phases.begin("saving the model")
    phases.end()
    assert stream.getvalue().splitlines() == ["[   4.2s] loading libraries"]


def test_phase_that_lasts_is_said_again_in_its_newest_words() -> None:
    stream = Watched(lines=3)
    phases = phases_in(stream, 0.01)
    phases.begin("reading")
    phases.update("reading: 12 documents")
    assert stream.full.wait(60), stream.getvalue()
    phases.end()
    first, *_, last = stream.getvalue().splitlines()
    assert first.startswith("[   4.2s] reading") and last == "[   4.2s] still reading: 12 documents"


def test_phases_on_a_closed_stream_are_dropped() -> None:
    stream = io.StringIO()
    stream.close()
    phases = phases_in(stream, 60.0)
    phases.begin("saving")
    phases.end()


def test_command_begins_with_its_process_and_not_with_its_imports() -> None:
    code = "from hypha_ray.config.entry_point import process_began_s; print(process_began_s())"
    before = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        started = time.monotonic()
        output, _ = process.communicate(timeout=120)
    assert before - 0.05 <= float(output) <= started + 0.05
