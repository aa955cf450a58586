"""Files and folders that only their owner can read, whatever the umask is: a run holds data, weights and settings."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

FILE = 0o600
FOLDER = 0o700


def opener(path: str, flags: int) -> int:
    """Open a file that is its owner's alone from then on, also if it was there before; for `open`."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE)
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and stat.S_IMODE(facts.st_mode) != FILE:
        with suppress(PermissionError):  # It belongs to another user, and is writable for us.
            os.fchmod(descriptor, FILE)
    return descriptor


def make_private(path: Path) -> None:
    """Let only the owner read a file or enter a folder; a link, and what it leads to, stays as it is."""
    facts = path.lstat()
    wanted = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER}.get(stat.S_IFMT(facts.st_mode))
    if wanted is not None and stat.S_IMODE(facts.st_mode) != wanted:
        with suppress(PermissionError):
            path.chmod(wanted)


def make_tree_private(folder: Path) -> None:
    """Do the same to a folder and all that is in it, for what other libraries write."""
    make_private(folder)
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # It has gone meanwhile.
                make_private(Path(above, name))
