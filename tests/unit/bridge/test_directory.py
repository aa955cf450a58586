"""The work directory, which a trainer shares that isn't trusted: nothing beyond it is read, written or removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.bridge import bridge_pb2 as pb
from hypha_ray.bridge.paths import (
    PREFIX,
    SPOOL,
    TRAINER,
    Scratch,
    WorkDirectory,
    content_of,
    handed_on,
    private_folder,
    sweep,
)
from hypha_ray.codec import encoders
from hypha_ray.config.schema import Sync
from hypha_ray.errors import BridgeError, TryAgainError
from hypha_ray.store.snapshots import chunks, write
from hypha_ray.types import Entry, Layout, Plan, Source, Span
from hypha_ray.types.events import HandOver
from hypha_ray.worker.bridged.messages import MAX_FILES, Inbound, Outbound
from hypha_ray.worker.incarnation import BatchSource
from tests.support.bridging import channels, together

FOLDERS = ("parameters", "slices", "updates")
LAYOUT = Layout((Entry("w", "float32", (4,), 0, "parameters/float32", 0, 4),))
PLAN = Plan(3, 0, (Span(0, 0, 0, 8),), 4)
WEIGHTS = {"w": np.arange(4, dtype=np.float32)}
PRECIOUS = ("job.json", "round_000001.safetensors", "round_000003.safetensors", "train_3_0_0_0_8.safetensors", "update")


class Host:
    """A work directory, and a folder beside it whose files have names that the driver uses."""

    def __init__(self, base: Path) -> None:
        self.work, self.beyond = base / "work", base / "beyond"
        for name in FOLDERS:
            (self.work / name).mkdir(parents=True)
        (self.work / "job.json").write_text("{}")
        self.beyond.mkdir()
        for name in PRECIOUS:
            (self.beyond / name).write_text("not the trainer's")

    def swap(self) -> None:
        """Put links in place of all folders and of the job file, as a trainer may at any moment."""
        for name in (*FOLDERS, "job.json"):
            with contextlib.suppress(OSError):
                (self.work / name).rename(self.work / f"old-{name}")
                (self.work / name).symlink_to(self.beyond if name in FOLDERS else self.beyond / name)

    def check(self) -> None:
        assert {path.name: path.read_text() for path in self.beyond.iterdir()} == dict.fromkeys(
            PRECIOUS, "not the trainer's"
        )


@contextlib.contextmanager
def swapped_before(call: int, host: Host) -> Iterator[list[int]]:
    """Swap the folders before the call of that number to the system; gives the number of calls."""
    calls = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                patch.undo()
                host.swap()
            return real(*arguments, **named)

        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "unlink", "rename", "dup", "fstat", "stat", "close"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield calls


def hand_out(host: Host, directory: WorkDirectory, shares_files: bool) -> None:
    """Give a trainer the job, three rounds' weights, and samples."""
    batch_source = BatchSource(0)
    batch_source.put(0, {"x": np.arange(8)})
    with channels(shares_files=shares_files) as (driver, trainer):
        driver.attach(directory, lambda path, size: None)
        (host.work.parent / "theirs").mkdir(exist_ok=True)
        for name in FOLDERS:
            (host.work.parent / "theirs" / name).mkdir(exist_ok=True)
        trainer.attach(WorkDirectory(host.work.parent / "theirs"), lambda path, size: None)
        handout = Outbound(driver, directory, batch_source)

        def give() -> None:
            try:
                handout.job("job.json")
                for number in (1, 2, 3):
                    handout.parameters(number, WEIGHTS)
                handout.assignment(PLAN, (0.1, 0.1))
            finally:
                driver.close()

        def hear() -> None:
            while True:
                trainer.receive()

        error, _ = together(give, hear)
        if error is not None:
            raise error


def take_in(host: Host, directory: WorkDirectory, shares_files: bool) -> None:
    """Take an update of a trainer, which was sent or lies there."""
    results = Inbound(Source("run", 1, 1), directory, encoders(Sync()))
    results.layout = LAYOUT
    results.begin(3)
    results.assigned(PLAN)
    draft = host.work.parent / "draft"
    write(draft, WEIGHTS)
    for path in ("updates/round_000001.safetensors", "updates/update"):
        if not shares_files:
            results.admit(path, draft.stat().st_size)
        with directory.create(path) as file:
            file.write(draft.read_bytes())
    message = pb.Update(round=3, content=content_of(draft), samples=8, batches=2)
    message.update.model_path = "updates/update"
    assert isinstance(next(iter(results.events_of("update", message))), HandOver)


@pytest.mark.parametrize("shares_files", [True, False])
@pytest.mark.parametrize("work", [hand_out, take_in])
def test_folders_swapped_for_links_at_any_step_lead_nowhere(
    work: Callable[[Host, WorkDirectory, bool], None], shares_files: bool, tmp_path: Path
) -> None:
    call, last = 0, 1
    refused = 0
    while call <= last:
        host = Host(tmp_path / str(call))
        directory = WorkDirectory(host.work)
        with swapped_before(call, host) as calls:
            try:
                work(host, directory, shares_files)
            except (BridgeError, TryAgainError) as error:
                assert error.code in ("PATH002", "PATH006", "FRM008"), error
                refused += 1
        directory.close()
        host.check()
        if call == 0:
            last = calls[0]  # So many there are if nothing is swapped.
        call += 1
    assert last > 20 and refused > last / 2


def test_file_of_ours_takes_the_place_of_whatever_has_its_name(tmp_path: Path) -> None:
    host = Host(tmp_path)
    directory = WorkDirectory(host.work)
    path = host.work / "parameters" / "x"
    for obstacle in (lambda: path.symlink_to(host.beyond / "update"), lambda: os.mkfifo(path), path.touch):
        obstacle()
        content = directory.write("parameters/x", [b"ab", b"c"])
        assert path.read_bytes() == b"abc" and not path.is_symlink() and content == content_of(path)
        assert path.stat().st_mode & 0o777 == 0o600
        directory.unlink("parameters/x")
        directory.unlink("parameters/x")
    os.link(host.beyond / "update", path)
    directory.write("parameters/x", [b"abc"])
    host.check()
    assert [one.name for one in (host.work / "parameters").iterdir()] == ["x"]


def test_old_files_are_removed_and_those_of_the_last_round_stay(tmp_path: Path) -> None:
    host = Host(tmp_path)
    directory, batch_source = WorkDirectory(host.work), BatchSource(0)
    batch_source.put(0, {"x": np.arange(64)})
    with channels(shares_files=True) as (driver, _):
        handout = Outbound(driver, directory, batch_source)
        for number in range(6):
            handout.parameters(number, WEIGHTS)
            handout.assignment(Plan(number, 0, (Span(0, 0, number * 8, number * 8 + 8),), 4), (0.1, 0.1))
    names = sorted(path.relative_to(host.work).as_posix() for path in host.work.rglob("*") if path.is_file())
    assert names == [
        "job.json",
        "parameters/round_000004.safetensors",
        "parameters/round_000005.safetensors",
        "slices/train_4_0_0_32_40.safetensors",
        "slices/train_5_0_0_40_48.safetensors",
    ]


# ── what a trainer sends ──────────────────────────────────────────────────────────────────────────────────────────────


def results_in(host: Host) -> Inbound:
    results = Inbound(Source("run", 1, 1), WorkDirectory(host.work), encoders(Sync()))
    results.layout = LAYOUT
    results.begin(3)
    results.assigned(PLAN)
    return results


def test_trainer_that_sends_file_after_file_has_one_on_the_disk_and_is_stopped(tmp_path: Path) -> None:
    host = Host(tmp_path)
    results, theirs = results_in(host), Host(tmp_path / "theirs")
    with channels() as (driver, trainer):
        driver.attach(WorkDirectory(host.work), results.admit)
        trainer.attach(WorkDirectory(theirs.work), lambda path, size: None)

        def send() -> None:
            for number in range(MAX_FILES + 1):
                (theirs.work / "updates" / str(number)).write_bytes(bytes(1000))
                trainer.send_file(f"updates/{number}")

        _, heard = together(send, driver.receive)
    assert isinstance(heard, BridgeError) and heard.code == "PATH009" and "one too many" in heard.what
    assert [path.name for path in (host.work / "updates").iterdir()] == [str(MAX_FILES - 1)]


def test_update_is_removed_once_it_is_read_and_one_that_comes_too_late_as_well(tmp_path: Path) -> None:
    host = Host(tmp_path)
    results, directory = results_in(host), WorkDirectory(host.work)
    for number, kinds in ((3, [HandOver]), (3, []), (2, [])):
        content = directory.write("updates/x", chunks(WEIGHTS))
        message = pb.Update(round=number, content=content, samples=8, batches=2)
        message.update.model_path = "updates/x"
        assert [type(item) for item in results.events_of("update", message)] == kinds
        assert list((host.work / "updates").iterdir()) == []


# ── what is left of processes that were killed ────────────────────────────────────────────────────────────────────────

_HOLDS = """
import sys
from hypha_ray.bridge.paths import LOCAL_RAY, PREFIX, SPOOL, TRAINER, Scratch
held = [Scratch(kind) for kind in (PREFIX, SPOOL, TRAINER, LOCAL_RAY)]
(held[1].path / "update").write_bytes(bytes(1000))
print("held", flush=True)
sys.stdin.read()
"""


def test_folders_of_a_killed_process_are_swept_up_and_those_of_a_living_one_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with (
        subprocess.Popen([sys.executable, "-c", _HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
        private_folder(SPOOL) as own,
    ):
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        sweep()
        assert len(list(tmp_path.glob(f"{TRAINER}*"))) == 1 and len(list(tmp_path.iterdir())) == 5
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        (tmp_path / f"{SPOOL}4194305-x").symlink_to(own)
        sweep()
        assert sorted(tmp_path.iterdir()) == sorted([own, tmp_path / f"{SPOOL}4194305-x"])
    assert not own.exists()


def test_folder_whose_process_is_unknown_here_is_swept_only_if_nobody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = Scratch(PREFIX)
    elsewhere = held.path.rename(tmp_path / f"{PREFIX}4194305-container")  # No process has that number.
    sweep()
    assert elsewhere.exists()
    held.close()
    sweep()
    assert not elsewhere.exists()


# ── what a started trainer is given ───────────────────────────────────────────────────────────────────────────────────


def test_trainer_gets_the_variables_it_needs_and_no_others() -> None:
    needed = "PATH HOME LANG LC_ALL TZ TMPDIR LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES OMP_NUM_THREADS"
    secrets = (
        "HF_TOKEN HUGGING_FACE_HUB_TOKEN HUGGINGFACE_TOKEN AWS_SECRET_ACCESS_KEY WANDB_API_KEY NVIDIA_API_KEY "
        "RAY_AUTH_TOKEN RAY_ADDRESS HTTPS_PROXY SSH_AUTH_SOCK OMP_TOKEN LC_ALL_TOKEN MY_PATH PATH_TO_KEY"
    )
    wanted = dict.fromkeys(needed.split(), "x")
    assert handed_on(wanted | dict.fromkeys(secrets.split(), "secret")) == wanted
