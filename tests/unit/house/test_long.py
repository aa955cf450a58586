"""Tests that are marked `long`: which ones a short run leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.long_tests import spread

ROOT = Path(__file__).parents[3]
VARIABLES = {"PYTHONPATH": str(ROOT)}
FILE = """
import pytest

def test_short():
    pass

@pytest.mark.long
def test_long():
    pass

@pytest.mark.long(keep=2)
@pytest.mark.parametrize("number", range(5))
def test_some(number):
    pass
"""


def passed(folder: Path, *arguments: str) -> set[str]:
    """Names of the tests that a run of pytest over the file has passed."""
    folder.joinpath("test_file.py").write_text(FILE)
    hooks = "from tests.conftest import pytest_addoption, pytest_collection_modifyitems, pytest_configure\n"
    folder.joinpath("conftest.py").write_text(hooks)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-W", "ignore", "-c", "/dev/null"]
    command += ["--rootdir", str(folder), *arguments]
    done = subprocess.run(command, cwd=folder, env=VARIABLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("::")[2] for line in done.stdout.splitlines() if line.startswith("PASSED")}


@pytest.mark.slow
def test_short_run_leaves_long_tests_out_and_keeps_some_of_their_cases(tmp_path: Path) -> None:
    cases = {f"test_some[{number}]" for number in range(5)}
    assert passed(tmp_path) == {"test_short", "test_long", *cases}
    assert passed(tmp_path, "--short") == {"test_short", "test_some[0]", "test_some[4]"}


@pytest.mark.parametrize(
    ("count", "keep", "numbers"),
    [(5, 0, set()), (5, 1, {0}), (5, 2, {0, 4}), (5, 3, {0, 2, 4}), (3, 3, {0, 1, 2}), (2, 5, {0, 1}), (0, 1, set())],
)
def test_kept_cases_are_spread_from_the_first_to_the_last(count: int, keep: int, numbers: set[int]) -> None:
    assert spread(count, keep) == numbers
