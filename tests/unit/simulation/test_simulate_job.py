"""`jobs/simulate.py` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hypha_ray.simulation.result import HEADLINE
from tests.support.forked_process import ROOT

FIELDS = {
    "settings",
    "rounds",
    "time_s",
    "bytes_up",
    "bytes_down",
    "utilisation",
    "idle_fraction",
    "goodput",
    "cost",
    "events",
}


def run(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, str(ROOT / "jobs/simulate.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


@pytest.mark.slow
def test_equal_seeds_give_equal_bytes_whatever_the_hashes(tmp_path: Path) -> None:
    arguments = ("--scenario", "home-1000", "--workers", "40", "--rounds", "4", "--json")
    written: list[bytes] = []
    for number, (seed, hash_seed) in enumerate([("1", "0"), ("1", "4711"), ("2", "0")]):
        file = tmp_path / f"{number}.json"
        completed = run(*arguments, str(file), "--seed", seed, hash_seed=hash_seed)
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout.splitlines()[0] == HEADLINE
        written.append(file.read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]
    (result,) = json.loads(written[0])
    assert result.keys() >= FIELDS
    assert result["settings"]["workers"] == 40
    assert result["settings"]["seed"] == 1
    assert result["rounds"] == 4


@pytest.mark.slow
def test_table_has_a_row_for_each_point_of_a_sweep_and_plots_are_drawn(tmp_path: Path) -> None:
    completed = run("rack", "--workers", "2", "--rounds", "2", "--plot", str(tmp_path / "plots"))
    assert completed.returncode == 0, completed.stderr
    first, _, *rows = completed.stdout.splitlines()
    assert first == HEADLINE
    assert "codec=fp32" in rows[0]
    assert "codec=int4" in rows[1]
    plots = sorted((tmp_path / "plots").glob("*.png"))
    assert [plot.stem for plot in plots] == ["bytes", "rounds", "use"]
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert all(str(plot) in rows for plot in plots)
