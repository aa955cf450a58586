"""Tab completion: what the command answers, and the script in a real shell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hypha_ray.config.entry_point import explanations
from hypha_ray.config.keys import keys
from hypha_ray.errors import ConfigError
from hypha_ray.files import jobs_folder, shipped_configs
from hypha_ray.history.completion import SCRIPTS, candidates, completion_script
from tests.support.run_folders import make_run

JOBS = {file.stem: file for file in jobs_folder().glob("*.py")}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with two runs."""
    monkeypatch.setenv("HYPHA_RAY_HOME", str(tmp_path))
    make_run(tmp_path, "texts-1")
    make_run(tmp_path, "digits")
    return tmp_path


def completed(line: str) -> list[str]:
    """Candidates for the last word; a line that ends in a space has an empty one."""
    return candidates(line.split(" "), JOBS)


def test_first_word_is_a_job_or_an_option() -> None:
    assert completed("") == sorted([*JOBS, "--help", "--version", "--completion"])
    assert completed("dil") == ["diloco"]
    assert completed("--completion ") == ["bash", "fish", "zsh"]


def test_options_of_a_training_job_are_the_keys_of_the_job_file() -> None:
    names = {f"--{key.name}" for path, key in keys().items() if path[0] == "rounds"}
    assert set(completed("diloco @ tiny --rounds.")) == names and len(names) > 5
    assert completed("grpo --dry") == ["--dry-run"]


def test_options_of_another_job_are_its_own() -> None:
    assert completed("runs --") == ["--dir", "--help", "--json", "--tag"]
    assert set(completed("rerun texts-1 --")) > {"--anyway", "--dry-run", "--run", "--run.name", "--rounds.epochs"}
    assert "--samples-per-slice" in completed("prepare --")  # Its options are those of the package.
    assert completed("evaluate --max-") == ["--max-response-tokens"]


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        ("diloco @ tiny --run.mode ", ["elastic", "replay"]),
        ("diloco @ tiny --run.mode = re", ["replay"]),
        ("diloco @ tiny --run.mode=re", ["--run.mode=replay"]),
        ("diloco --telemetry.sinks pro", ["prometheus"]),
        ("diloco --telemetry.sinks jsonl,pro", ["jsonl,prometheus"]),
        ("diloco --sync.quorum ", ["auto"]),
        ("rerun texts-1 --run.mode e", ["elastic"]),
        ("market --share ", ["bid", "fair"]),
        ("diloco --rounds.epochs ", []),
    ],
)
def test_choices_follow_their_option(line: str, choices: list[str]) -> None:
    assert completed(line) == choices


def test_job_files_follow_an_at_sign() -> None:
    assert completed("diloco @ ") == sorted(shipped_configs())
    assert completed("diloco @ ti") == completed("configs ti") == ["tiny"]
    assert completed("diloco @ti") == ["@tiny"]


@pytest.mark.parametrize("line", ["show tex", "diloco --resume tex", "compare digits tex", "show --run = tex"])
def test_names_of_runs_follow_options_and_jobs_that_take_them(line: str) -> None:
    assert completed(line) == ["texts-1"]


def test_codes_follow_explain() -> None:
    assert completed("explain cfg00") == sorted(code for code in explanations() if code.startswith("CFG00"))


def test_words_that_are_files_are_left_to_the_shell() -> None:
    assert completed("prepare --source te") == []
    assert completed("nosuch ") == []


def test_shell_without_a_script_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CFG003.*bash, zsh, fish"):
        completion_script("csh")


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A folder with the command `hypha-ray`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "hypha-ray"
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hypha_ray "$@"\n')
    file.chmod(0o700)
    return folder


PROBES = {
    "bash": """\
source <(hypha-ray --completion bash)
complete -p hypha-ray >/dev/null || exit 1
COMP_WORDS=(hypha-ray show te); COMP_CWORD=2
_hypha_ray
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "fish": "hypha-ray --completion fish | source; complete -C 'hypha-ray show te'",
    "zsh": """\
source <(hypha-ray --completion zsh)
compadd() { shift; print -l -- "$@"; }
words=(hypha-ray show te); CURRENT=3
_hypha_ray
""",
}


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_script_completes_the_name_of_a_run_in_a_real_shell(shell: str, command: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} isn't installed")
    quiet = {"bash": ["--norc"], "fish": ["--no-config"], "zsh": ["-f"]}[shell]
    path = f"{command}:/usr/bin:/bin"
    done = subprocess.run(
        [program, *quiet, "-c", PROBES[shell]],
        env={
            "PATH": path,
            "HOME": str(command.parent),
            "HYPHA_RAY_HOME": str(command.parent),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["texts-1"], "")
