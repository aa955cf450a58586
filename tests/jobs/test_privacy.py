"""A run that anybody could read if the umask had its way, with a password in its mirror's URL."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job_scripts import ALONE, Jobs

MIRROR = "nonsense://me:s3cr3t@there/x"


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_run_is_its_owners_alone_and_its_password_is_nowhere(run_job: Jobs, small_job: Path, corpus: Path) -> None:
    words: tuple[str | Path, ...] = ("@", small_job, "--dataset.path", corpus, "--run.name", "r")
    sinks = ("--telemetry.sinks", '["console", "jsonl", "aim"]', "--telemetry.plots", "true")
    more = ("--rounds.update_rounds", "1", *sinks)
    done = run_job(*words, *more, "--checkpoint.mirror", MIRROR, env=ALONE)  # Its workers inherit the umask.
    assert done.returncode == 0, done.stderr
    run = run_job.home / "r"
    assert {path.name for path in run.iterdir()} >= {"config.toml", "metrics.jsonl", "plots", "model", ".aim"}
    seen = {path.relative_to(run).as_posix(): stat.S_IMODE(path.lstat().st_mode) for path in (run, *run.rglob("*"))}
    assert {name: oct(mode) for name, mode in seen.items() if mode & 0o077 and not (run / name).is_symlink()} == {}
    again = run_job("--resume", "r", "--rounds.update_rounds", "2")
    assert again.returncode == 2 and "error[CFG104]: checkpoint.mirror needs the secret of its URL" in again.stderr
    texts = [done.stdout, done.stderr, again.stdout, again.stderr]
    assert "to nonsense://there/x failed" in done.stdout + done.stderr
    assert not any("s3cr3t" in text for text in texts)
    for path in run_job.home.rglob("*"):
        assert not path.is_file() or b"s3cr3t" not in path.read_bytes(), path
