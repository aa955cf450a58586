"""The entry point of job scripts: its errors, its lines on the work, result files, and libraries that exit."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest
from ray.exceptions import RayTaskError

from hypha_ray.config import entry_point
from hypha_ray.config.entry_point import STDOUT, Phases, print_notes, require_writable, run, write_result
from hypha_ray.config.options import parse_options
from hypha_ray.errors import (
    AuthenticationError,
    CapacityError,
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    HubError,
    HyphaError,
)

SCRIPT = """
import ctypes, sys
from pathlib import Path
from hypha_ray.config.entry_point import run

def main():
    starts = Path(sys.argv[1])
    count = len(starts.read_text()) if starts.exists() else 0
    starts.write_text("x" * (count + 1))
    if count < int(sys.argv[2]):
        getattr(ctypes, sys.argv[3])(None).exit(int(sys.argv[4]))
    print("done")

if __name__ == "__main__":
    run(main)
"""


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (HyphaError, 1),
        (ConfigError, 2),
        (DataError, 3),
        (AuthenticationError, 4),
        (CheckpointError, 5),
        (CapacityError, 75),
        (ClusterError, 75),
        (HubError, 75),
    ],
)
def test_run_user_error_prints_one_line_and_exits_with_its_code(
    kind: type[HyphaError], exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(raising(kind("X001", "a file is broken", "3 bytes", "8 bytes", "get it again")))
    assert caught.value.code == exit_code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "error[X001]: a file is broken — got 3 bytes, allowed 8 bytes. Fix: get it again\n"


def test_run_error_out_of_a_ray_task_prints_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    cause = DataError("X001", "slice 3 is damaged")
    wrapped = RayTaskError("worker.run", "Traceback (most recent call last): …", cause).as_instanceof_cause()
    assert isinstance(wrapped, DataError)
    assert isinstance(wrapped, RayTaskError)
    with pytest.raises(SystemExit) as caught:
        run(raising(wrapped))
    assert caught.value.code == 3
    assert capsys.readouterr().err == "error[X001]: slice 3 is damaged.\n"


def test_run_error_without_a_remedy_prints_that_of_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(raising(ConfigError("CHAOS001", "--kills is out of range", "0", "1 and up")))
    problem = "error[CHAOS001]: --kills is out of range — got 0, allowed 1 and up. "
    assert capsys.readouterr().err == f"{problem}Fix: give an allowed value; python jobs/chaos.py --help lists them\n"


def test_run_interrupt_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(raising(KeyboardInterrupt()))
    assert caught.value.code == 130
    assert capsys.readouterr().err == ""


def test_run_bug_propagates() -> None:
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()))


def test_run_success_returns() -> None:
    called = []
    run(lambda: called.append(True))
    assert called == [True]


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


def test_first_line_of_a_command_counts_from_its_beginning_through_phases_that_are_short() -> None:
    stream = Watched(lines=1)
    phases = phases_in(stream, 60.0, short_s=5.25)
    for text in ("checking the settings", "loading libraries", "checking the model"):
        phases.begin(text)
    assert stream.full.wait(3), "each phase began the wait anew"
    phases.end()
    assert stream.getvalue().splitlines() == ["[   4.2s] checking the model"]


def test_phase_that_lasts_is_said_again_in_its_newest_words() -> None:
    stream = Watched(lines=3)
    phases = phases_in(stream, 0.01)
    phases.begin("reading")
    phases.update("reading: 12 documents")
    assert stream.full.wait(60), stream.getvalue()
    phases.end()
    first, *_, last = stream.getvalue().splitlines()
    assert first.startswith("[   4.2s] reading") and last == "[   4.2s] still reading: 12 documents"


class Pieces(io.StringIO):
    """A stream that keeps what it was given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_lines_of_a_command_and_of_its_phases_are_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads write them, and one that came in pieces would stand in the middle of the other."""
    stream = Pieces()
    monkeypatch.setattr(sys, "stderr", stream)

    def main() -> None:
        phases = phases_in(stream, 0.01)
        phases.begin("reading")
        while "reading" not in stream.getvalue():
            time.sleep(0.001)
        phases.end()
        print_notes(["by the way"])
        raise ConfigError("CFG003", "it is out of range")

    with pytest.raises(SystemExit):
        run(main)
    lines = list(filter(None, stream.pieces))
    assert [line[:6] for line in dict.fromkeys(lines)][-2:] == ["note: ", "error["]
    assert all(line.count("\n") == 1 and line.endswith("\n") for line in lines)


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


def test_places_that_cannot_be_written_are_refused_before_and_after(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "figures.json", tmp_path / ("x" * 300)):
        for refuse in (require_writable, lambda option, file: write_result(option, file, "{}")):
            with pytest.raises(ConfigError, match=r"CFG008.*--json can't be used.*a file that can be written"):
                refuse("--json", place)


def test_files_that_can_be_written_are_taken_and_left_as_they_are(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    for file in (None, old, tmp_path / "new.json"):
        require_writable("--json", file)
    assert old.read_text() == "{}" and not (tmp_path / "new.json").exists()


@dataclass(frozen=True)
class Listing:
    """List something."""

    json: Path | None = None
    """file for the list"""
    out: Path | None = None
    """file for the page"""


@pytest.mark.parametrize("option", ["json", "out"])
def test_result_for_standard_output_is_alone_there(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # Both are as before in the end.
    monkeypatch.setattr(entry_point, "_results", [])
    options = parse_options(Listing, "A job.", [f"--{option}", "-"])
    assert getattr(options, option) == STDOUT
    print("for people")
    require_writable(f"--{option}", STDOUT)
    write_result(f"--{option}", STDOUT, "[1]\n")
    captured = capsys.readouterr()
    assert captured.out == "[1]\n" and captured.err == "for people\n"


def test_standard_output_takes_one_result() -> None:
    with pytest.raises(ConfigError, match=r"CFG011.*--json and --out exclude each other as standard output"):
        parse_options(Listing, "A job.", ["--json", "-", "--out", "-"])


def started(tmp_path: Path, failures: int, library: str, code: int = 2) -> tuple[int, str, str, int]:
    """Exit code, output, errors and number of starts of a command whose first starts are ended by a library."""
    script, starts = tmp_path / "script.py", tmp_path / "starts"
    script.write_text(SCRIPT)
    starts.unlink(missing_ok=True)
    command = [sys.executable, str(script), str(starts), str(failures), library, str(code)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return ended.returncode, ended.stdout, ended.stderr, len(starts.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("library", ["CDLL", "PyDLL"], ids=["beside Python", "as an import does, holding its lock"])
def test_process_that_a_library_ends_begins_anew_once_and_then_asks_for_another_try(
    tmp_path: Path, library: str
) -> None:
    assert started(tmp_path, 0, library)[::3] == (0, 1)
    code, output, errors, starts = started(tmp_path, 1, library)
    assert (code, output, starts) == (0, "done\n", 2) and "it begins anew" in errors
    code, output, errors, starts = started(tmp_path, 9, library)
    assert (code, output, starts) == (75, "", 2) and "error[ENV001]" in errors


def test_other_exits_of_a_library_are_left_as_they_are(tmp_path: Path) -> None:
    assert started(tmp_path, 9, "CDLL", code=5)[::3] == (5, 1)
