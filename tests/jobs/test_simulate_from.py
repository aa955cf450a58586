"""`jobs/simulate.py --from RUN` as a user runs it, from a recorded run; no Ray is started."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.forked_process import run_script
from tests.support.job_scripts import said
from tests.support.recorded_run import write_run


def simulate(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = run_script("simulate.py", *arguments, HYPHA_RAY_HOME=str(home))
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, said(done.stderr))


def test_simulate_from_a_run_prints_the_best_of_all_tries_and_writes_them(tmp_path: Path) -> None:
    write_run(tmp_path / "steady")
    tries = ["--try", "sync.codec=int4", "--try", "sync.delay_steps=2,rounds.samples_between_updates=60"]
    done = simulate(tmp_path, "--from", "steady", *tries, "--deadline", "6h", "--json", str(tmp_path / "rows.json"))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "simulated: times, bytes and costs; no loss curve"
    assert any(line.startswith("best: sync.delay_steps=2,rounds.samples_between_updates=60") for line in lines)
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["try"] for row in rows] == ["as recorded", tries[1], tries[3]]
    assert rows[1]["bytes_up"] < rows[0]["bytes_up"] / 7


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("--from stedy", 5, "error[CKPT001]: there is no run 'stedy'"),
        ("--from stedy", 5, "did you mean 'steady'?"),
        ("--from short", 5, "error[SIM001]: run short is too short to simulate"),
        ("--from steady --try sync.codek=int4", 2, "did you mean `sync.codec`?"),
        ("--from steady --try worker.compile=true", 2, "error[SIM003]"),
        ("--from steady --deadline soon", 2, "allowed a time in s, min, h or d"),
        ("--from steady --scenario laptop", 2, "--from and --scenario exclude each other"),
        ("--scenario laptop --try sync.codec=int4", 2, "--try is for --from alone"),
    ],
)
def test_simulate_from_a_run_with_a_mistake_is_one_line(tmp_path: Path, arguments: str, code: int, text: str) -> None:
    write_run(tmp_path / "steady")
    write_run(tmp_path / "short", [(0.1, 0.2)])
    done = simulate(tmp_path, *arguments.split())
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = done.stderr.splitlines()
    assert text in line
