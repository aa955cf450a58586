"""Files of a real run by pytest-xdist: each is run once, and the process that fills gaps has those that compute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import gap_filling
from tests.support.gap_filling import FILLER, NICENESS

ROOT = Path(__file__).parents[3]
COMPUTING = [f"tests/unit/{room}/test_sums.py" for room in ("codec", "model", "optim", "scheduler")]
COMPUTING += ["tests/jobs/test_looking.py", "tests/unit/rl/test_rewards.py"]
TIMED = [f"tests/{room}/test_waits.py" for room in ("cluster", "jobs", "unit/bridge", "unit/rl", "unit/worker")]
SUMS = f"""
import os

def test_priority():
    filler = os.environ["PYTEST_XDIST_WORKER"] == {FILLER!r}
    assert os.nice(0) - int(os.environ["BEFORE"]) == filler * {NICENESS}
"""
WAITS = "import time\n\ndef test_waits():\n    time.sleep(1.0)\n" + SUMS


def test_files_that_compute_in_rooms_that_wait_are_there() -> None:
    assert all((ROOT / "tests" / file).exists() for file in gap_filling.COMPUTING)


@pytest.mark.slow
def test_third_process_takes_what_computes_and_the_others_take_all(tmp_path: Path) -> None:
    for text, files in ((SUMS, COMPUTING), (WAITS, TIMED)):
        for file in files:
            tmp_path.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
            tmp_path.joinpath(file).write_text(text)
    hooks = "from tests.conftest import pytest_configure, pytest_xdist_make_scheduler\n"
    (tmp_path / "conftest.py").write_text(hooks)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "3", "--dist", "loadfile"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables |= {"PYTHONPATH": str(ROOT), "BEFORE": str(os.nice(0))}
    command += ["--no-loadscope-reorder", "--import-mode=importlib", "--rootdir", str(tmp_path)]
    run = subprocess.run(command, check=False, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    taken = re.findall(r"^\[(gw\d)\].* PASSED (\S+)::(\S+)", run.stdout, re.MULTILINE)
    expected = [(file, "test_priority") for file in COMPUTING + TIMED] + [(file, "test_waits") for file in TIMED]
    assert sorted(one[1:] for one in taken) == sorted(expected)
    by_filler = {file for process, file, _ in taken if process == FILLER}
    assert by_filler
    assert by_filler.issubset(COMPUTING)
