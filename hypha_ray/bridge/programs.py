"""Surroundings of programs that are started: environment variables, and temporary folders that outlive no process."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_HANDED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TERM|XDG_RUNTIME_DIR|DOCKER_HOST"
    r"|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|NODE_PATH|SSL_CERT_(FILE|DIR)"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|OMP_(PLACES|PROC_BIND|WAIT_POLICY)|MKL_THREADING_LAYER"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|HOME|PATH|LAUNCH_BLOCKING)|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)"
    r"|(HIP|ROCR)_VISIBLE_DEVICES|PYTORCH_CUDA_ALLOC_CONF|HF_HOME|HF_HUB_(CACHE|OFFLINE)|TRANSFORMERS_OFFLINE"
)
"""Names of variables that a program gets of a worker's; see docs/bridge.md."""
PREFIX = "hypha-bridge-"
SPOOL = "hypha-spool-"
TRAINER = "hypha-trainer-"
WEIGHTS = "hypha-weights-"
LOCAL_RAY = "hypha-ray-"
"""Prefixes of folder names: work directories of drivers, copies of trainers' files, directories of remote trainers,
weights for servers that generate, sockets of a local Ray."""


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a program gets of a worker's: any other one may hold a secret."""
    return {name: value for name, value in environment.items() if _HANDED_ON.fullmatch(name)}


class Scratch:
    """A private folder that lasts as long as this process; a lock shows other processes that it is in use.

    Args:
        kind: prefix of the folder's name.
        parent: folder that it is made in; None: that of temporary files.

    """

    def __init__(self, kind: str, parent: str | None = None) -> None:
        prefix = f"{kind}{os.getpid()}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def private_folder(kind: str) -> Iterator[Path]:
    """Make a folder of that kind, and remove it at the end."""
    scratch = Scratch(kind)
    try:
        yield scratch.path
    finally:
        scratch.close()


def sweep(parent: str | None = None) -> None:
    """Remove the folders that this user's killed processes left behind, there or among temporary files."""
    for kind in (PREFIX, SPOOL, TRAINER, WEIGHTS, LOCAL_RAY):
        for folder in Path(parent or tempfile.gettempdir()).glob(f"{kind}*"):
            pid = folder.name.removeprefix(kind).partition("-")[0]
            if pid.isdigit() and not _is_alive(int(pid)) and _is_unused(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_unused(folder: Path) -> bool:
    """Whether a folder is this user's and unlocked; its process may run in another container, invisible here."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
