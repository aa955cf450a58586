"""All jobs' command lines as a user types them: one grammar, one form of error, streams that don't end a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job_scripts import said

ROOT = Path(__file__).parents[2]
JOBS = (
    "prepare",
    "data",
    "doctor",
    "evaluate",
    "generate",
    "export",
    "plot",
    "chaos",
    "bench",
    "worker",
    "diloco",
    "sync",
    "dpo",
    "grpo",
    "ppo",
    "rerun",
    "market",
    "simulate",
)


def shell(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash; JOB stands for the interpreter and the folder of the job scripts."""
    line = "set -o pipefail; " + command.replace("JOB ", f"{sys.executable} {ROOT}/jobs/")
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(["bash", "-c", line], cwd=cwd, env=own, capture_output=True, timeout=120, check=False)
    errors = said(done.stderr.decode()).encode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, errors)


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("prepare.py --sorce digits", 2, "error[CFG001]: unknown flag --sorce. Fix: did you mean --source?"),
        ("evaluate.py --modle m", 2, "error[CFG001]: unknown flag --modle. Fix: did you mean --model?"),
        ("plot.py --rnu r", 2, "error[CFG001]: unknown flag --rnu. Fix: did you mean --run?"),
        ("export.py --rnu r", 2, "error[CFG001]: unknown flag --rnu. Fix: did you mean --run?"),
        ("export.py --run nosuch", 5, "error[CKPT001]: there is no run 'nosuch'"),
        ("generate.py --model nosuch", 5, "error[CKPT001]: there is no run 'nosuch'"),
        ("generate.py --model m --top-p 2", 2, "error[CFG003]: --top-p is out of range — got 2.0, allowed above 0"),
        ("chaos.py --role worker", 2, "error[CFG001]: unknown flag --role. Fix: did you mean --roles?"),
        ("bench.py --onyl planner", 2, "error[CFG001]: unknown flag --onyl. Fix: did you mean --only?"),
        ("worker.py --conect h:1", 2, "error[CFG001]: unknown flag --conect. Fix: did you mean --connect?"),
        ("prepare.py --out d", 2, "error[CFG012]: --source is missing"),
        ("evaluate.py --model m", 2, "error[CFG012]: --dataset is missing"),
        ("plot.py", 2, "error[CFG012]: --run is missing"),
        ("chaos.py --rounds 3", 2, "error[CFG012]: --mean-rounds-between-kills is missing"),
        ("worker.py --device tpu --connect h:1", 2, "error[CFG003]: --device is out of range — got 'tpu', allowed"),
        ("prepare.py --source digits --out=d --seed x", 2, "error[CFG002]: --seed has the wrong type — got 'x'"),
        ("worker.py --connect h:1 --patience-s nan", 2, "error[CFG003]: --patience-s is out of range — got nan"),
        ("market.py --share fair", 2, "error[CFG011]: --share is for --open alone. Fix: leave it out, or give --open"),
        ("market.py --node x", 2, "error[CFG011]: --node is for --offer or --withdraw alone"),
        ("market.py --whole", 2, "error[CFG011]: --whole is for --offer alone. Fix: leave it out, or give --offer"),
        ("data.py --check a --node b", 2, "error[CFG011]: --node is for --serve or --withdraw alone"),
        ("market.py --offer --price=-1", 2, "error[CFG003]: the terms are out of range — got price = -1.0"),
        (
            "market.py --offer --accepts all",
            2,
            "error[CFG003]: the terms are out of range — got accepts = all",
        ),
        ("market.py --price 0", 2, "error[CFG011]: --price is for --offer alone"),
        ("market.py --offer --withdraw", 2, "error[CFG011]: --offer and --withdraw exclude each other"),
        ("market.py --open --close", 2, "error[CFG011]: --open and --close exclude each other"),
        ("rerun.py r --anywya", 2, "error[CFG001]: unknown flag --anywya. Fix: did you mean --anyway?"),
        ("rerun.py r --resume", 2, "error[CFG001]: unknown flag --resume. Fix: leave it out"),
        ("rerun.py nosuch", 5, "error[CKPT001]: there is no run 'nosuch'"),
        ("rerun.py", 2, "error[CFG012]: --run is missing"),
        ("doctor.py --jsn f", 2, "error[CFG001]: unknown flag --jsn. Fix: did you mean --json?"),
        ("doctor.py --json no/such/file", 2, "error[CFG008]: --json can't be used"),
        ("prepare.py digits", 2, "error[CFG015]: unexpected argument 'digits'"),
        (r"plot.py --run $'no\xff'", 5, "error[CKPT001]: "),
        (r"prepare.py --source $'no\xff.txt' --out d", 3, "error[DATA030]: there is no file or folder no?.txt"),
    ],
)
def test_mistake_is_one_line_and_an_exit_code(tmp_path: Path, line: str, code: int, error: str) -> None:
    done = shell(f"JOB {line}", tmp_path)
    (printed,) = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (code, b"")
    assert printed.startswith(error) and " Fix: " in printed


@pytest.mark.parametrize("job", JOBS)
def test_every_job_has_help(tmp_path: Path, job: str) -> None:
    done = shell(f"JOB {job}.py --help", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--help" in done.stdout and shell(f"JOB {job}.py -h", tmp_path).stdout == done.stdout


DIGITS = "JOB prepare.py --source digits --out d"


@pytest.mark.parametrize(
    ("ending", "unbuffered"),
    [("| head -1", ""), ("| true", "1"), ("2>&1 | true", ""), (">&-", ""), (">&- 2>&- <&-", "1")],
)
def test_output_that_nobody_reads_ends_no_job(tmp_path: Path, ending: str, unbuffered: str) -> None:
    done = shell(f"{DIGITS} {ending}", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "d" / "manifest.json").exists()


def test_error_that_nobody_reads_keeps_its_exit_code(tmp_path: Path) -> None:
    done = shell("JOB prepare.py --source digits --out d --seed x 2>&1 | true", tmp_path)
    assert (done.returncode, done.stderr) == (2, b"")


def test_output_to_a_full_disk_is_an_error(tmp_path: Path) -> None:
    done = shell(f"{DIGITS} > /dev/full", tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith(b"error[OUT001]: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("settings", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_streams_that_lack_a_character_show_a_question_mark(tmp_path: Path, settings: dict[str, str]) -> None:
    done = shell(DIGITS.replace("--out d", "--out größe"), tmp_path, PYTHONCOERCECLOCALE="0", **settings)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/gr" in done.stdout.splitlines()[-1] and b"?" in done.stdout.splitlines()[-1]


def test_names_that_are_no_utf8_are_shown_and_kept(tmp_path: Path) -> None:
    done = shell(DIGITS.replace("--out d", r"--out $'d\xff'"), tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.splitlines()[-1].endswith(b"/d?")
    assert (tmp_path / os.fsdecode(b"d\xff") / "manifest.json").exists()
