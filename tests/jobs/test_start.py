"""A Ray of a job's own starts beside the checks; whatever ends the job meanwhile, nothing of it stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job_scripts import Jobs, jobs_in, said

ROOT = Path(__file__).parents[2]
ANEW = {"RAY_BACKEND_LOG_LEVEL": "warning"}
"""Variable of a job in an interpreter of its own, where Ray isn't loaded yet."""


@pytest.fixture
def run_alone(tmp_path: Path) -> Iterator[Jobs]:
    """Runs a job that starts a Ray of its own."""
    with jobs_in(tmp_path / "home") as jobs:
        yield jobs


def test_refusal_by_the_checks_ends_the_ray_that_starts_beside_them(
    run_alone: Jobs, small_job: Path, corpus: Path
) -> None:
    done = run_alone("@", small_job, "--dataset.path", corpus, "--model.config.vocab_size", "100", env=ANEW)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error[DATA023]: ") and done.stderr.count("\n") == 1


def test_ray_that_does_not_start_is_one_error(run_alone: Jobs, small_job: Path, corpus: Path) -> None:
    done = run_alone("@", small_job, "--dataset.path", corpus, env={**ANEW, "RAY_GCS_SERVER_PORT": "none"})
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.startswith("error[NET002]: Ray did not start on this machine") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("phase", ["loading libraries", "checking the model and the data", "starting workers"])
def test_interruption_of_each_phase_is_reported_and_leaves_nothing(
    run_alone: Jobs, small_job: Path, corpus: Path, tmp_path: Path, phase: str
) -> None:
    env = dict(ANEW)
    if (
        phase == "loading libraries"
    ):  # One of them loads slowly: on a fast machine they would be loaded before it is said.
        (tmp_path / "slow").mkdir()
        (tmp_path / "slow" / "ray.py").write_text("import time\ntime.sleep(60)\n")
        env["PYTHONPATH"] = f"{tmp_path / 'slow'}{os.pathsep}{ROOT}"
    words = ("@", small_job, "--dataset.path", corpus, "--run.name", "a")
    with run_alone.start(*words, env=env) as process:
        stream = process.stdout if phase == "starting workers" else process.stderr  # type: ignore[union-attr]
        assert stream is not None
        assert any(phase in line for line in iter(stream.readline, ""))
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert output.splitlines()[-1] == f"run: {run_alone.home / 'a'}"
    last = said(errors).splitlines()[-1]
    assert last.startswith("stopped before the first commit: nothing is committed yet; go on with: ")
    assert "Traceback" not in errors
    run_alone.require_none_left()
