"""The report of an interrupted job: how far it is, where it is, and the command, as typed, that goes on."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hypha_ray.config import Job
from hypha_ray.config.training import Checkpoint
from hypha_ray.driver.start import TERMINATED, InterruptionReport, own_command, sigterm_restored
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.directory import RunDirectory
from tests.support.store_bench import ask

COMMAND = ["python", "jobs/diloco.py", "@", "my job.toml", "--run.name", "a"]
ROOT = Path(__file__).parents[3]
PASTED = "python jobs/diloco.py @ 'my job.toml' --run.name a"
SECRET = ["--dataset.path", "https://me:s3cret@host/d?token=abc"]
HIDDEN = ["--dataset.path", "https://me:***@host/d?token=***"]


def run_of(parent: Path, rounds: int, **checkpoint: int) -> RunDirectory:
    directory = RunDirectory.create(parent, "a", "")
    store = CommitWriter(directory.path, Checkpoint(**checkpoint), 1000)
    for number in range(rounds):
        ask(store, number, number + 1)
    return directory


def interruption(directory: RunDirectory, resume: list[str] | None = None) -> InterruptionReport:
    job = Job.model_validate({"rounds": {"update_rounds": 10}})
    return InterruptionReport(job, directory, COMMAND, resume)


def test_interruption_names_the_round_and_the_command_that_can_be_pasted(tmp_path: Path) -> None:
    text = interruption(run_of(tmp_path, 3)).text()
    assert text == f"stopped after round 3 of 10; go on with: {PASTED}"
    assert shlex.split(text.partition("go on with: ")[2]) == COMMAND


@pytest.mark.parametrize("begun", [False, True])
def test_interruption_before_a_commit_says_that_nothing_is_committed(tmp_path: Path, begun: bool) -> None:
    directory = run_of(tmp_path, 0) if begun else RunDirectory(tmp_path / "a")
    assert interruption(directory).text() == (
        f"stopped before the first commit: nothing is committed yet; go on with: {PASTED}"
    )


def test_interruption_of_a_run_without_a_name_resumes_its_folder_once_it_has_begun(tmp_path: Path) -> None:
    resume = ["python", "jobs/diloco.py", "--resume", "/runs/diloco-1"]
    assert interruption(RunDirectory(tmp_path / "a"), resume).text().endswith(f"go on with: {PASTED}")
    assert interruption(run_of(tmp_path, 1), resume).text().endswith(f"go on with: {shlex.join(resume)}")


def test_interruption_after_rounds_without_a_checkpoint_names_the_newest_checkpoint(tmp_path: Path) -> None:
    directory = run_of(tmp_path, 5, every_rounds=3)
    text = interruption(directory).text()
    assert text.startswith("stopped after round 5 of 10; the newest checkpoint is that of round 3; go on with: ")
    shutil.rmtree(directory.path / "checkpoints" / "round_000002")
    assert "the newest checkpoint is that of round 1; go on" in interruption(directory).text()


def test_interruption_shows_no_secret_of_a_url(tmp_path: Path) -> None:
    job, command = Job(), ["python", "jobs/diloco.py", "--checkpoint.mirror", "sftp://me:s3cret@host/runs"]
    text = InterruptionReport(job, RunDirectory(tmp_path / "a"), command).text()
    assert "s3cret" not in text and "sftp://me:" in text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(TERMINATED)])
def test_interruption_is_reported_once_with_the_run_as_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    told = interruption(run_of(tmp_path, 2))
    with pytest.raises(type(error)), told.reported(), told.reported():
        raise error
    output, errors = capsys.readouterr()
    assert output == f"run: {tmp_path / 'a'}\n"
    assert errors == f"stopped after round 2 of 10; go on with: {PASTED}\n"


def test_other_ends_are_no_interruption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (SystemExit(2), ValueError("broken")):
        with pytest.raises(type(error)), interruption(run_of(tmp_path / str(error), 1)).reported():
            raise error
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, TERMINATED)])
def test_command_interrupted_while_it_loads_says_where_the_run_will_be(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    """Loading takes long because of a library that does: on a fast machine it would end before it is said."""
    (tmp_path / "data").mkdir()
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "ray.py").write_text("import time\ntime.sleep(60)\n")
    words = ["jobs/diloco.py", "--model.repository", "x", "--dataset.path", str(tmp_path / "data"), "--run.dir"]
    command = [sys.executable, *words, str(tmp_path / "my runs"), "--run.name", "a"]
    environment = {**os.environ, "PYTHONPATH": f"{slow}{os.pathsep}{ROOT}"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        assert any(line.endswith("] loading libraries\n") for line in process.stderr)
        process.send_signal(sent)
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (status, f"run: {tmp_path}/my runs/a\n")
    last = errors.splitlines()[-1]
    told, _, again = last.partition("; go on with: ")
    assert told == "stopped before the first commit: nothing is committed yet" and shlex.split(again) == command


@pytest.mark.parametrize(
    ("words", "script", "arguments", "expected"),
    [
        (
            ["python", "jobs/diloco.py"],
            "jobs/diloco.py",
            ["@", "job.toml"],
            ["python", "jobs/diloco.py", "@", "job.toml"],
        ),
        (["python3", "-u", "mine.py"], "mine.py", ["--lr", "3"], ["python3", "mine.py", "--lr", "3"]),
        (["python", "/env/bin/hypha-ray", "grpo"], "/lib/jobs/grpo.py", ["@", "x"], ["hypha-ray", "grpo", "@", "x"]),
        (["python", "-m", "hypha_ray"], "/lib/jobs/grpo.py", ["x"], ["python", "-m", "hypha_ray", "grpo", "x"]),
        (["python", "jobs/diloco.py"], "jobs/diloco.py", SECRET, ["python", "jobs/diloco.py", *HIDDEN]),
    ],
    ids=["script", "options of Python", "installed", "module", "secrets"],
)
def test_command_is_what_a_user_typed_without_secrets(
    monkeypatch: pytest.MonkeyPatch, words: list[str], script: str, arguments: list[str], expected: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.setattr(sys, "orig_argv", [*words, *arguments])
    assert own_command() == expected


def test_handler_of_sigterm_that_a_library_replaces_is_there_during_a_training_and_after_it() -> None:
    """As that of a service, which calls `hypha_ray.train`: Ray's client installs one of its own as it connects."""
    calls: list[str] = []
    old_handler = signal.signal(signal.SIGTERM, lambda *_: calls.append("own"))
    try:
        with sigterm_restored() as restore:
            signal.signal(signal.SIGTERM, lambda *_: calls.append("library's"))
            signal.raise_signal(signal.SIGTERM)
            restore()
            signal.raise_signal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *_: calls.append("library's"))
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, old_handler)
    assert calls == ["library's", "own", "own"]


def test_process_without_a_handler_of_sigterm_ends_by_an_exception_during_a_training_alone() -> None:
    old_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with sigterm_restored() as restore:
            restore()
            with pytest.raises(SystemExit) as raised:
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, old_handler)
    assert raised.value.code == TERMINATED


def test_status_that_a_library_changes_on_the_way_is_that_of_sigterm_and_the_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's client raises another `SystemExit` if the signal comes while it waits."""
    old_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        report = interruption(run_of(tmp_path / "a", 2))
        with pytest.raises(SystemExit) as raised, sigterm_restored() as restore, report.reported():
            restore()
            try:
                signal.raise_signal(signal.SIGTERM)
            except SystemExit:
                raise SystemExit(1) from None
        assert raised.value.code == TERMINATED
        assert capsys.readouterr().err.startswith("stopped after round 2 of 10")
        with pytest.raises(SystemExit) as raised, sigterm_restored():
            raise SystemExit(1)
        assert raised.value.code == 1
    finally:
        signal.signal(signal.SIGTERM, old_handler)


def test_handler_of_sigterm_may_be_any_object_that_can_be_called() -> None:
    class Flag(list[int]):
        """As a list, it has no hash."""

        def __call__(self, number: int, _: object) -> None:
            self.append(number)

    flag = Flag()
    old_handler = signal.signal(signal.SIGTERM, flag)
    try:
        with sigterm_restored() as restore:
            restore()
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is flag
    finally:
        signal.signal(signal.SIGTERM, old_handler)
    assert flag == [signal.SIGTERM]


def test_ignored_sigterm_stays_ignored() -> None:
    old_handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_restored() as restore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            restore()
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, old_handler)
