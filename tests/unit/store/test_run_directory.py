"""The run directory: one driver at a time, locks, whole job files, attempts, slices left out, how runs are found."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from hypha_ray.driver.run_folders import find_run
from hypha_ray.errors import CheckpointError, ConfigError, TryAgainError
from hypha_ray.store import directory
from hypha_ray.store.directory import (
    LOCK,
    QUARANTINE,
    Lock,
    LockedError,
    RunDirectory,
    holder_of,
    lock_store,
    quarantine,
    quarantined,
)

HOLD = """
import sys, pathlib
from hypha_ray.store.directory import RunDirectory
lock = RunDirectory(pathlib.Path(sys.argv[1])).lock()
print("held", flush=True)
sys.stdin.read()
"""
HOLDER = """
import sys
from pathlib import Path
from hypha_ray.store.directory import Lock
held = Lock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Attempts send the process's log to their files; not beyond a test."""
    before = list(logging.getLogger().handlers)
    yield
    for handler in [handler for handler in logging.getLogger().handlers if handler not in before]:
        logging.getLogger().removeHandler(handler)
        handler.close()


def a_run(parent: Path, name: str = "mine", config: str = "[run]\n") -> RunDirectory:
    return RunDirectory.create(parent, name, config)


def test_create_where_a_run_is_already_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    directory = a_run(tmp_path)
    with pytest.raises(ConfigError, match="RUN001"):
        a_run(tmp_path, config="[model]\n")
    assert directory.config.read_text() == "[run]\n"


def test_lock_while_another_driver_has_it_names_that_one_until_it_is_killed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "mine")
    command = [sys.executable, "-c", HOLD, str(directory.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(
            ConfigError, match=rf"RUN002.*run mine is running already — got pid {other.pid} on \S+ since"
        ):
            directory.lock()
        holder = holder_of(directory.path / LOCK)
        assert holder is not None and holder.pid == other.pid
        other.kill()
        other.wait()
    assert holder_of(directory.path / LOCK) is None
    with directory.lock():
        assert not directory.begun


def test_look_at_a_lock_makes_no_file_and_stops_no_driver(tmp_path: Path) -> None:
    directory = a_run(tmp_path)
    assert holder_of(directory.path / LOCK) is None
    assert not (directory.path / LOCK).exists()
    directory.lock().release()
    with (directory.path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # Another process looks.
        looked = threading.Timer(0.01, file.close)
        looked.start()
        with directory.lock():
            looked.join()


def test_lock_in_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"CFG008.*can't be written"):
        RunDirectory(tmp_path / "file" / "mine").lock()


def test_configure_keeps_what_the_last_attempt_went_by(tmp_path: Path) -> None:
    directory = a_run(tmp_path, config="a = 1\n")
    assert (directory.begin_attempt(), directory.begin_attempt()) == (1, 2)
    directory.configure("a = 1\n")
    assert list(directory.path.glob("config.attempt_*")) == []
    directory.configure("a = 2\n")
    directory.configure("a = 3\n")  # Nothing was ever trained by 2.
    assert directory.config.read_text() == "a = 3\n"
    assert [path.name for path in directory.path.glob("config.attempt_*")] == ["config.attempt_002.toml"]
    assert (directory.path / "config.attempt_002.toml").read_text() == "a = 1\n"


def test_attempts_grow_over_processes_and_each_has_its_log(tmp_path: Path) -> None:
    directory = a_run(tmp_path)
    log = logging.getLogger("hypha_ray.test")
    for number in (1, 2):
        assert RunDirectory(directory.path).begin_attempt() == number
        log.info("this is %d", number)
    directory.count_from(7)
    assert directory.begin_attempt() == 8
    log.info("this is 8")
    texts = {path.name: path.read_text() for path in (directory.path / "logs").glob("attempt_*.log")}
    assert {name: text.rpartition(": ")[2] for name, text in texts.items()} == {
        "attempt_001.log": "this is 1\n",
        "attempt_002.log": "this is 2\n",
        "attempt_007.log": "",
        "attempt_008.log": "this is 8\n",
    }
    assert (directory.path / "logs" / "latest").readlink() == Path("attempt_008.log")


def test_find_run_takes_a_name_before_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    monkeypatch.setenv("HYPHA_RAY_HOME", str(home))
    here.mkdir()
    monkeypatch.chdir(here)
    folder = a_run(here).path
    assert find_run("mine", None, None) == folder == find_run(str(folder), None, None)
    named = a_run(home).path
    assert find_run("mine", None, None) == named
    assert find_run("mine", None, str(here)) == folder
    assert find_run("../here/mine", None, None).resolve() == folder


def test_find_run_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    a_run(tmp_path, "llama-tiny")
    (tmp_path / "llama-tinx").mkdir()  # no run: it has no job file
    with pytest.raises(CheckpointError, match=r"CKPT001.*no run 'llama-tinx' in .*did you mean 'llama-tiny'\?"):
        find_run("llama-tinx", None, str(tmp_path))


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_lock_of_another_process_says_who_has_it_and_ends_with_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with holder(path) as other:
        with pytest.raises(LockedError) as caught:
            Lock.acquire(path)
        assert (caught.value.pid, caught.value.host) == (other.pid, socket.gethostname())
        assert caught.value.since is not None and datetime.fromisoformat(caught.value.since).tzinfo is not None
        other.kill()
        with Lock.acquire(path, 10), pytest.raises(LockedError) as caught:
            Lock.acquire(path)
        assert caught.value.pid == os.getpid()


def test_lock_released_twice_is_free_once_more(tmp_path: Path) -> None:
    first = Lock.acquire(tmp_path / "a")
    first.release()
    second = Lock.acquire(tmp_path / "a")
    first.release()
    with pytest.raises(LockedError):
        Lock.acquire(tmp_path / "a")
    second.release()


def test_lock_whose_file_says_nothing_is_locks_all_the_same(tmp_path: Path) -> None:
    with Lock.acquire(tmp_path / "a"):
        (tmp_path / "a").write_text("")
        with pytest.raises(LockedError, match=r"process \? on \?"):
            Lock.acquire(tmp_path / "a")


def test_lock_does_not_live_on_in_children(tmp_path: Path) -> None:
    """A child that is started while a lock is held, and outlives it, doesn't have it."""
    mine = Lock.acquire(tmp_path / "a")
    fork = multiprocessing.get_context("fork")
    go_on = fork.Event()
    forked = fork.Process(target=go_on.wait)
    forked.start()
    try:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False):
            mine.release()
            Lock.acquire(tmp_path / "a", 5).release()  # They let go soon after they are there.
    finally:
        go_on.set()
        forked.join()


def test_lock_of_a_store_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_TAKEOVER_S", 0.1)
    with (
        lock_store(tmp_path),
        pytest.raises(CheckpointError, match=f"another process writes.*process {os.getpid()} on"),
    ):
        lock_store(tmp_path)
    lock_store(tmp_path).release()


def test_lock_of_a_store_that_is_being_killed_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path / "store.lock") as other:
        other.kill()
        lock_store(tmp_path).release()


def test_lock_in_a_place_that_cannot_be_written_asks_to_try_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TryAgainError, match=r"store\.lock can't be written"):
        lock_store(tmp_path / "file" / "run")


def test_slices_are_listed_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    assert quarantined(tmp_path) == {}
    quarantine(tmp_path, 17, "cut off")
    quarantine(tmp_path, 3, "flipped")
    assert quarantined(tmp_path) == {3: "flipped", 17: "cut off"}
    assert [path.name for path in tmp_path.iterdir()] == [QUARANTINE]


def test_first_reason_counts(tmp_path: Path) -> None:
    quarantine(tmp_path, 17, "cut off")
    before = (tmp_path / QUARANTINE).read_bytes()
    quarantine(tmp_path, 17, "flipped")
    assert (tmp_path / QUARANTINE).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"slices": [], "checksum": ""}', b"\xff"])
def test_damaged_list_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / QUARANTINE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"STORE014.*quarantine.json is damaged.*remove it"):
        quarantined(tmp_path)


def test_list_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    quarantine(tmp_path, 17, "cut off")
    content = bytearray((tmp_path / QUARANTINE).read_bytes())
    content[content.index(b"17")] ^= 1
    (tmp_path / QUARANTINE).write_bytes(content)
    with pytest.raises(CheckpointError, match="STORE014"):
        quarantined(tmp_path)
