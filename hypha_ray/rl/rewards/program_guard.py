"""Process between a worker and a response's program: it judges by the program's stops, and removes its traces.

    python -I -S program_guard.py FOLDER

The folder has `program.py` and `tests.py`. The verdict goes to standard output: 1 if the tests have passed, otherwise
0. Standard input is a pipe of the worker, which ends with it. The environment is empty, since a program can read that
of its parent.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LIMIT_S = 10.0
"""Longest time of a program with its tests."""
_END_S = 5.0
"""Longest time to end all processes that a program has left."""
_PROGRAM = Path(__file__).resolve().with_name("program.py")


def main(folder: Path) -> None:
    """Run the program, write the verdict, and remove the folder with its contents."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # Orphans of the program become children of this process.
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # A program may rename the folder.
    tests = (folder / "tests.py").read_bytes()
    (folder / "tests.py").unlink()
    try:
        (folder / "work").mkdir()
        passed = _passes(folder, tests)
    finally:
        _kill_all()
    os.write(1, b"1" if passed else b"0")
    remove(root)


def _passes(folder: Path, tests: bytes) -> bool:
    """Whether the program runs to its end, and then the tests do."""
    wake = _wake_descriptor()
    until = time.monotonic() + _LIMIT_S
    no_streams = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    command = [sys.executable, "-I", str(_PROGRAM), str(folder)]
    process = os.posix_spawn(sys.executable, command, {}, file_actions=no_streams, setsid=True)
    if not _stops(process, wake, until):
        return False
    with suppress(OSError), (folder / "tests.py").open("xb") as file:
        file.write(tests)
    os.kill(process, signal.SIGCONT)
    return _stops(process, wake, until)


def _wake_descriptor() -> int:
    """Return a descriptor that is ready when a child has ended or stopped."""
    ready_end, wake_end = os.pipe()
    os.set_blocking(wake_end, False)
    os.set_blocking(ready_end, False)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return ready_end


def _stops(process: int, wake: int, until: float) -> bool:
    """Whether the process stops itself in time; False if the process or the worker ends."""
    while True:
        changed, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
        if changed:
            return os.WIFSTOPPED(status)
        left_s = max(0.0, until - time.monotonic())
        readable, *_ = select.select([0, wake], [], [], left_s)
        if not readable or 0 in readable:
            return False
        with suppress(BlockingIOError):
            os.read(wake, 4096)


def _kill_all() -> None:
    """Kill all children, and those that they leave, until there is none."""
    until = time.monotonic() + _END_S
    while (children := _children()) and time.monotonic() < until:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        text = path.read_text()
    except FileNotFoundError:  # This kernel doesn't list children.
        return []
    return [int(pid) for pid in text.split()]


def remove(root: int) -> None:
    """Remove an open folder and its contents, however deep.

    Folders within folders are moved to the top first, so neither the stack nor a path grows with the depth.
    """
    prefix = os.urandom(8).hex()
    folder_count = 0
    with suppress(OSError):
        os.fchmod(root, 0o700)
        while entries := _entries(root):
            for name, is_folder in entries:
                if not is_folder:
                    os.unlink(name, dir_fd=root)
                    continue
                folder_count = _flatten(root, name, prefix, folder_count)
                os.rmdir(name, dir_fd=root)
        Path(f"/proc/self/fd/{root}").readlink().rmdir()
    os.close(root)


def _entries(folder: int) -> list[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _flatten(root: int, name: str, prefix: str, folder_count: int) -> int:
    """Remove a folder's files, and move its folders to the top under numbers of their own; return the last number."""
    os.chmod(name, 0o700, dir_fd=root)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
    try:
        for entry_name, is_folder in _entries(folder):
            if is_folder:
                folder_count += 1
                os.chmod(entry_name, 0o700, dir_fd=folder)  # A moved folder's entry for its parent is written.
                os.rename(entry_name, f"{prefix}-{folder_count}", src_dir_fd=folder, dst_dir_fd=root)
            else:
                os.unlink(entry_name, dir_fd=folder)
    finally:
        os.close(folder)
    return folder_count


if __name__ == "__main__":
    main(Path(sys.argv[1]))
