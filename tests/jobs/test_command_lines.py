"""All jobs' command lines as a user types them: one grammar, one form of error, streams that don't end a job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job_scripts import said
from tests.support.light_commands import LightCommands, light_commands

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "jobs").glob("*.py"))
HEAVY = {"ray", "torch", "transformers", "datasets", "numpy", "pyarrow", "matplotlib", "sklearn", "aim", "rich"}


def shell(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash; JOB stands for the interpreter and the folder of the job scripts."""
    line = "set -o pipefail; " + command.replace("JOB ", f"{sys.executable} {ROOT}/jobs/")
    own = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(["bash", "-c", line], cwd=cwd, env=own, capture_output=True, timeout=120, check=False)
    errors = said(done.stderr.decode()).encode()
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, errors)


@pytest.fixture(scope="module")
def light_command() -> Iterator[LightCommands]:
    with light_commands() as run:
        yield run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_of_every_job_imports_nothing_heavy(light_command: LightCommands, script: Path) -> None:
    """Its answer is there at once: what takes seconds are these imports."""
    done = light_command(script.stem, "--help")
    assert (done.returncode, said(done.stderr)) == (0, "")
    expected = [script.name, "--help", *{"evaluate": ["--dataset"], "plot": ["--run"]}.get(script.stem, [])]
    assert [word for word in expected if word not in done.stdout] == []
    assert light_command(script.stem, "-h").stdout == done.stdout
    assert "hypha_ray" in done.modules and HEAVY.isdisjoint(done.modules)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("bench --only core --beside .", "error[CFG011]: --beside is for the rows of start alone. Fix: "),
        ("bench --only start --beside elsewhere", "error[CFG003]: --beside is no checkout — got elsewhere. Fix: "),
        ("bench --only gpu --plots /proc/x", "error[CFG015]: the plots can't be written to /proc/x — got No such file"),
        ("chaos --mean-rounds-between-kills 0 --kills 1", "error[CHAOS001]: --mean-rounds-between-kills is out of ra"),
        ("worker --connect 127.0.0.1:1", "error[CFG021]: no file with the token. Fix: give --token-file, or set "),
    ],
)
def test_wrong_value_is_one_line_with_a_remedy_before_anything_is_loaded(
    light_command: LightCommands, words: str, problem: str
) -> None:
    done = light_command(*words.split())
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith(problem) and " Fix: " in line
    assert HEAVY.isdisjoint(done.modules)


DIGITS = "JOB prepare.py --source digits --out d"


@pytest.mark.parametrize(
    ("ending", "unbuffered"),
    [("| head -1", ""), ("| true", "1"), ("2>&1 | true", ""), (">&-", ""), (">&- 2>&- <&-", "1")],
)
@pytest.mark.long(keep=1)
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
