"""Locks: one holder, whoever it is, until it lets go or is killed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.store import directory
from hypha_ray.store.directory import Lock, LockedError, lock_store

HOLDER = """
import sys
from pathlib import Path
from hypha_ray.store.directory import Lock
held = Lock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


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
