"""Runs that go on: after the driver or the scheduler was killed, by name, by directory, from a mirror, and longer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.telemetry.sinks.files import read_jsonl
from hypha_ray.types import Span
from tests.support.job_scripts import ALONE, Done, Jobs, said

Words = tuple[str | Path, ...]
ROUNDS = 6
FAST: Words = ("--testing.batch_s", "0.001")
IMPATIENT = {"hypha_ray.driver.ray_cluster.GONE_S": 5.0}
"""Of a driver that doesn't wait half a minute for a Ray that won't come back: Ray's listener computes all the while."""


def slow(job: Path, corpus: Path, name: str, batch_s: float = 0.15) -> Words:
    """Rounds of eight batches each, of a second on any machine, so that there is a middle to kill something in."""
    sizes = ("--rounds.update_rounds", str(ROUNDS), "--testing.batch_s", str(batch_s))
    return ("@", job, "--dataset.path", corpus, "--run.name", name, *sizes)


@contextmanager
def running(process: subprocess.Popen[str], rounds: int, of: int = ROUNDS) -> Iterator[subprocess.Popen[str]]:
    """A job that has shown so many rounds or more; it is killed in the end."""
    with process:
        try:
            assert process.stdout is not None
            shown = (re.match(rf" *(\d+)/{of} ", line) for line in process.stdout)
            assert any(row is not None and int(row[1]) >= rounds for row in shown), process.communicate()
            yield process
        finally:
            process.kill()


def commits(run: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted((run / "commits").glob("round_*.json"))]


def whole(run: Path, rounds: int) -> None:
    """Every round is committed, and every sample is in one commit at most."""
    log = commits(run)
    assert [commit["round"] for commit in log] == list(range(rounds))
    assert [one["parent_sha256"] for one in log[1:]] == [one["theta_sha256"] for one in log[:-1]]
    spans = [Span(*span) for commit in log for spans in commit["spans"].values() for span in spans]
    used = Counter((span.epoch, span.slice, sample) for span in spans for sample in range(span.start, span.stop))
    assert set(used.values()) == {1}
    assert len(used) == sum(delta["samples"] for commit in log for delta in commit["deltas"])
    incarnations = [max(delta["incarnation"] for delta in commit["deltas"]) for commit in log]
    assert incarnations == sorted(incarnations)


def told(run: Path, rounds: int) -> None:
    """Every round is in the metrics once, however often it was trained."""
    metrics = {kind: [one["round"] for one in read_jsonl(run / "metrics.jsonl", [kind])] for kind in ("round", "eval")}
    assert metrics["round"] == list(range(rounds))
    assert set(metrics["eval"]) == set(range(rounds))


def attempts(run: Path) -> list[int]:
    return [event["attempt"] for event in read_jsonl(run / "events.jsonl", ["attempt"])]


def ok(done: Done) -> Done:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


def refused(done: Done, exit_code: int) -> str:
    """The one line of a job that was refused."""
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def killed(run_shared_job: Jobs, small_job: Path, corpus: Path) -> Path:
    """A copy of a run whose driver was killed after two rounds; while it ran, a second driver was refused."""
    words = slow(small_job, corpus, "first")
    with running(run_shared_job.start(*words), rounds=2) as driver:
        with run_shared_job.start(*words) as second:
            output, errors = second.communicate()
        assert (second.returncode, output) == (2, "")
        assert errors.splitlines()[-1].startswith(
            f"error[RUN002]: run first is running already — got pid {driver.pid} on "
        )
    return Path(shutil.copytree(run_shared_job.home / "first", run_shared_job.home / "killed" / "first"))


@pytest.fixture(scope="module")
def finished(killed: Path, run_shared_job: Jobs, small_job: Path, corpus: Path) -> Path:
    """The same run, which the same command has brought to its end."""
    done = ok(run_shared_job(*slow(small_job, corpus, "first")))
    before = len(commits(killed))
    assert before >= 2
    run = run_shared_job.home / "first"
    assert f"note: run first goes on after round {len(commits(killed))} of {ROUNDS}" in done.stderr.splitlines()
    rows = [line.split()[0] for line in done.stdout.splitlines() if f"/{ROUNDS} " in line]
    assert rows == [f"{number}/{ROUNDS}" for number in range(before + 1, ROUNDS + 1)]
    assert done.stdout.splitlines()[-1] == f"run: {run}"
    return run


def test_killed_driver_goes_on_by_the_same_command_and_loses_nothing(finished: Path, killed: Path) -> None:
    whole(finished, ROUNDS)
    told(finished, ROUNDS)
    assert commits(finished)[: len(commits(killed))] == commits(killed)
    assert attempts(finished) == [1, 2]
    assert sorted(path.name for path in (finished / "logs").glob("attempt_*")) == ["attempt_001.log", "attempt_002.log"]
    assert (finished / "model" / "config.json").is_file() and list(finished.glob("config.attempt_*")) == []


def test_finished_run_again_trains_nothing_and_exports_again(
    finished: Path, run_shared_job: Jobs, small_job: Path, corpus: Path
) -> None:
    shutil.rmtree(finished / "model")
    done = ok(run_shared_job(*slow(small_job, corpus, "first")))
    assert done.stdout.splitlines() == [f"run: {finished}"]
    assert f"note: run first has all of its {ROUNDS} rounds" in done.stderr.splitlines()
    assert (finished / "model" / "model.safetensors").is_file() and attempts(finished) == [1, 2]


def test_changed_job_is_refused_without_resume_and_taken_with_it(
    finished: Path, run_shared_job: Jobs, small_job: Path, corpus: Path
) -> None:
    longer = ("--rounds.update_rounds", str(ROUNDS + 1))
    error = refused(run_shared_job(*slow(small_job, corpus, "first"), *longer), 2)
    assert error.startswith(
        f"error[RUN001]: run.name: there is a run 'first' in {run_shared_job.home}, by another job: "
    )
    difference = f"rounds.update_rounds is {ROUNDS + 1} here and {ROUNDS} in the run"
    assert difference in error and "--resume" in error
    done = ok(run_shared_job("--resume", "first", *longer))
    assert done.stderr.splitlines() == [
        f"note: {difference}; it is taken as it is here",
        f"note: run first goes on after round {ROUNDS} of {ROUNDS + 1}",
    ]
    whole(finished, ROUNDS + 1)
    told(finished, ROUNDS + 1)
    assert attempts(finished) == [1, 2, 3]
    assert f"update_rounds = {ROUNDS}\n" in (finished / "config.attempt_002.toml").read_text()
    assert f"update_rounds = {ROUNDS + 1}\n" in (finished / "config.toml").read_text()


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--model.config.hidden_size", "64"), "model.config.hidden_size is 64 here and 32 in the run"),
        (("--run.seed", "1"), "run.seed is 1 here and 0 in the run"),
        (("--inner_optimizer.name", "muon"), "inner_optimizer.name is 'muon' here and 'adamw' in the run"),
    ],
)
def test_another_training_is_refused_with_resume_too(
    flags: Words, difference: str, killed: Path, run_shared_job: Jobs
) -> None:
    before = (killed / "config.toml").read_text()
    error = refused(run_shared_job("--resume", killed, *flags), 5)
    assert error.startswith(f"error[CKPT004]: run first is another training: {difference}. Fix: ")
    assert (killed / "config.toml").read_text() == before


def test_dataset_with_other_samples_is_refused_and_the_same_one_elsewhere_is_taken(
    killed: Path, run_job: Jobs, corpus: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(killed, tmp_path / "moved"))
    prepare(PrepareOptions("stdlib", tmp_path / "other", seq_len=32, max_samples=500), lambda what, count: None)
    error = refused(run_job("--resume", run, "--dataset.path", tmp_path / "other"), 5)
    assert error.startswith("error[CKPT004]: run moved is another training: dataset.path is ")
    same = Path(shutil.copytree(corpus, tmp_path / "same"))
    done = ok(run_job("--resume", run, "--dataset.path", same, *FAST))
    assert f"note: dataset.path is '{same}' here and '{corpus}' in the run; it is taken as it is here" in done.stderr
    whole(run, ROUNDS)
    shutil.rmtree(same)
    shutil.copytree(tmp_path / "other", same)
    error = refused(run_job("--resume", run), 5)
    assert error.startswith("error[CKPT004]: run moved is another training: dataset 'other' has other samples now")


def test_resume_of_nothing_names_the_nearest_run(
    killed: Path, run_shared_job: Jobs, small_job: Path, corpus: Path
) -> None:
    home = run_shared_job.home
    error = refused(run_shared_job("--resume", "fisrt"), 5)
    assert error == f"error[CKPT001]: there is no run 'fisrt' in {home}. Fix: did you mean 'first'?"
    words = ("@", small_job, "--dataset.path", corpus, "--run.name", "none")
    error = refused(run_shared_job(*words, "--resume"), 5)
    fix = "give the name or folder of a run; to begin one, leave --resume out"
    assert error == f"error[CKPT001]: there is no run 'none' in {home}. Fix: {fix}"
    assert not (home / "none").exists()


def test_run_without_any_commit_starts_from_the_beginning(killed: Path, run_job: Jobs, tmp_path: Path) -> None:
    run = tmp_path / "early"
    run.mkdir()
    shutil.copy(killed / "config.toml", run)
    done = ok(run_job("--resume", run, *FAST))
    assert "note: run early has no commit yet, and starts from the beginning" in done.stderr.splitlines()
    whole(run, ROUNDS)


@pytest.mark.long
def test_run_goes_on_from_its_mirror_in_a_new_home(
    run_job: Jobs, small_job: Path, corpus: Path, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"
    plots = ("--telemetry.plots", "true")
    words = (*slow(small_job, corpus, "mirrored"), *plots)
    with running(run_job.start(*words, "--checkpoint.mirror", str(mirror)), rounds=3):
        pass
    there = commits(mirror / "mirrored")
    assert there
    run_job.home.rename(tmp_path / "lost")
    anew = run_job(*words, "--checkpoint.mirror", str(mirror))
    assert anew.returncode == 2 and "RUN001]: run.name: there is a run 'mirrored' in checkpoint.mirror" in anew.stderr
    assert commits(mirror / "mirrored") == there
    done = ok(run_job("--resume", f"file://{mirror}/mirrored", *FAST, *plots))
    run = run_job.home / "mirrored"
    assert f"note: run mirrored goes on after round {len(there)} of {ROUNDS}" in done.stderr.splitlines()
    assert done.stdout.splitlines()[-1] == f"run: {run}"
    assert commits(run)[: len(there)] == there == commits(mirror / "mirrored")[: len(there)]
    whole(run, ROUNDS)
    for name in ("metrics.jsonl", "events.jsonl", "summary.json", "model/model.safetensors", "plots/loss.png"):
        assert (mirror / "mirrored" / name).read_bytes() == (run / name).read_bytes()
    attempts = [event["attempt"] for event in read_jsonl(run / "events.jsonl", kinds=("attempt",))]
    assert attempts == [1, 2], "the way back brings no history"


@pytest.mark.long
def test_run_goes_on_in_another_ray_after_its_driver_was_killed_and_after_its_ray_was(
    run_job: Jobs, small_job: Path, corpus: Path
) -> None:
    run = run_job.home / "alone"
    words = (*slow(small_job, corpus, "alone", batch_s=0.1), "--rounds.update_rounds", "1000")
    with running(run_job.start(*words, env=ALONE), rounds=2, of=1000):
        pass
    before = commits(run)  # Its scheduler may outlive it by a moment, and commit one more.
    with running(run_job.start(*words, env=ALONE, constants=IMPATIENT), rounds=len(before) + 1, of=1000) as driver:
        (service,) = [pid for pid in run_job.processes() if Path(f"/proc/{pid}/comm").read_text() == "gcs_server\n"]
        os.kill(service, signal.SIGKILL)
        _, errors = driver.communicate()
    assert driver.returncode == 75
    later = commits(run)
    first = [commit for commit in later if all(delta["incarnation"] < 20_000 for delta in commit["deltas"])]
    assert said(errors).splitlines()[0] == f"note: run alone goes on after round {len(first)} of 1000"
    assert [line[:14] for line in said(errors).splitlines()[1:]] == ["error[NET009]:"]
    ok(run_job("--resume", "alone", "--rounds.update_rounds", str(len(later) + 2), *FAST, env=ALONE))
    assert commits(run)[: len(later)] == later and later[: len(before)] == before
    whole(run, len(later) + 2)
    assert attempts(run)[0] == 1 and len(attempts(run)) >= 3


def test_killed_scheduler_is_followed_by_another_until_nothing_is_done_in_between(
    run_job: Jobs, small_job: Path, corpus: Path, tmp_path: Path
) -> None:
    arguments = ("@", small_job, "--dataset.path", corpus, "--testing.failpoint_log", tmp_path / "hits.jsonl")
    kill = "--testing.failpoints"
    done = ok(run_job(*arguments, "--run.name", "once", kill, "scheduler.before_reduce=kill@2"))
    assert "the scheduler died; going on from the last commit" in done.stdout
    whole(run_job.home / "once", 3)
    told(run_job.home / "once", 3)
    assert attempts(run_job.home / "once") == [1, 2]
    done = run_job(*arguments, "--run.name", "always", kill, "scheduler.start=kill@*")
    assert done.returncode == 75 and "Traceback" not in done.stderr
    assert "error[NET003]: the scheduler died 3 times without a step" in done.stderr
    assert len([*(run_job.home / "always" / "logs").glob("attempt_*.log")]) == 3
