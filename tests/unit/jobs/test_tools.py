"""Benchmarks and the chaos lab are found by the processes that a script of theirs starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import subprocess, sys
from hypha_ray.files import use_tools
use_tools()
import benchmarks.start
sys.exit(subprocess.run([sys.executable, "-c", "import benchmarks.start, chaoslab.options, {other}"]).returncode)
"""


@pytest.mark.parametrize("inherited", [None, "own"])
def test_processes_that_are_started_find_the_tools_and_what_they_found_before(
    tmp_path: Path, inherited: str | None
) -> None:
    (tmp_path / "own_module.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if inherited is not None:
        environment["PYTHONPATH"] = str(tmp_path)
    code = START.format(other="json" if inherited is None else "own_module")
    started = subprocess.run([sys.executable, "-c", code], cwd=tmp_path.parent, env=environment, check=False)
    assert started.returncode == 0
