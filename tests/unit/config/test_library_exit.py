"""Libraries that end the process from C, as a stand-in does here by the C library's own `exit`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
