"""A run's folders and files are its owner's alone, whatever the umask is and whoever has written them before."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypha_ray.config import Job
from hypha_ray.config.training import Checkpoint
from hypha_ray.files import make_private, opener
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.directory import RunDirectory, lock_store, quarantine
from hypha_ray.store.mirror import Mirror, fetch
from hypha_ray.telemetry.plots import draw
from hypha_ray.telemetry.sinks.base import build
from hypha_ray.worker.bridged.process import listen_for_trainer, trainer_log
from tests.support.store_bench import LAYOUT, ask, flats
from tests.unit.telemetry.test_plots import a_round


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct, autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Modes of a folder and all that is in it, links apart, where they aren't what they should be."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        mode, wanted = stat.S_IMODE(path.lstat().st_mode), 0o700 if path.is_dir() else 0o600
        if not path.is_symlink() and mode != wanted:
            found[path.relative_to(folder.parent).as_posix()] = oct(mode)
    return found


def write_a_run(parent: Path, mirror: Path) -> Path:
    """Have everything written that processes of a run write, on whatever node they are."""
    directory = RunDirectory.create(parent, "r", "x = 1\n")
    with directory.lock(), lock_store(directory.path):
        directory.begin_attempt()
        directory.configure("x = 2\n")
        directory.count_from(7)
        store = CommitWriter(directory.path, Checkpoint(), 2)
        store.begin(LAYOUT, *flats(9)[:2])
        assert ask(store, 0, 1).problem is None
        quarantine(directory.path, 3, "damaged")
        assert Mirror(str(mirror), directory.path).push(0, 1) is None
        sinks = build(directory.path, "r", ["jsonl"])
        sinks.start({})
        sinks.record(a_round(0))
        sinks.event({"kind": "join"})
        sinks.summary({"rounds": 1})
        sinks.close()
        draw(directory.path)
        bridge = {"commands": [""], "listen": "127.0.0.1:0"}
        run = {"name": "r", "dir": str(parent)}
        job = Job.model_validate({"run": run, "resources": {"num_workers": 1}, "bridge": bridge})
        listen_for_trainer(job, 0).close()
        log = trainer_log(job, 0)
        assert log is not None
        log.close()
    return directory.path


@pytest.mark.slow
def test_run_directory_and_its_copies_are_the_owners_alone(tmp_path: Path) -> None:
    run = write_a_run(tmp_path / "runs", tmp_path / "mirror")
    names = {path.name for path in run.rglob("*")}
    assert {
        "config.toml",
        "metrics.jsonl",
        "worker-0.log",
        "worker-0.address",
        "loss.png",
        "round_000000.json",
    } <= names
    assert modes(run) == {} and modes(tmp_path / "mirror" / "r") == {}
    fetch(str(tmp_path / "mirror" / "r"), tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} >= {"config.toml", "commits", "checkpoints"}
    assert modes(tmp_path / "copy") == {}


@pytest.mark.slow
def test_run_that_others_could_read_is_the_owners_alone_once_it_goes_on(tmp_path: Path) -> None:
    run = write_a_run(tmp_path / "runs", tmp_path / "mirror")
    (tmp_path / "elsewhere").write_text("x")
    (tmp_path / "elsewhere").chmod(0o644)
    (run / "link").symlink_to(tmp_path / "elsewhere")
    for path in (run, *run.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)
    with RunDirectory(run).lock():
        assert modes(run) == {}
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o644, "what a link leads to isn't the run's"


def test_only_regular_files_and_folders_change_their_modes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o640)
    before = stat.S_IMODE((tmp_path / "fifo").stat().st_mode)
    make_private(tmp_path / "fifo")
    os.close(opener(str(tmp_path / "fifo"), os.O_RDWR))
    assert stat.S_IMODE((tmp_path / "fifo").stat().st_mode) == before
