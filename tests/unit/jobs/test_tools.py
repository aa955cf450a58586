"""Benchmarks and the chaos lab are found by the processes that a script of theirs starts."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"

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


def test_files_that_tools_name_are_there() -> None:
    modules = sorted(TOOLS.rglob("*.py"))
    named = {}
    for module in modules:
        if "Path(__file__)" not in module.read_text(encoding="utf-8"):
            continue
        source = ast.parse(module.read_text(encoding="utf-8"))
        for statement in source.body:
            if isinstance(statement, ast.Assign) and "__file__" in ast.unparse(statement.value):
                place = eval(ast.unparse(statement.value), {"Path": Path, "__file__": str(module)})
                named[module.name, ast.unparse(statement.targets[0])] = place
    missing = {name: str(place) for name, place in named.items() if not place.exists()}
    assert len(named) >= 6
    assert not missing
