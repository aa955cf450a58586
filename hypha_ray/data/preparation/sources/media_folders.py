"""Folders of images or recordings, in a folder for each class: ``flowers/rose/1.jpg``; free of heavy imports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, TypeAlias

from hypha_ray.data.provenance import Account

Medium: TypeAlias = Literal["images", "recordings"]

SUFFIXES: Final[dict[Medium, frozenset[str]]] = {
    "images": frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}),
    "recordings": frozenset({".wav", ".flac", ".ogg", ".oga", ".mp3"}),
}
"""Suffixes of files, in lower case."""


def medium_of(source: str, mixed: bool) -> Medium | None:
    """The medium of a folder's files; None if it isn't a folder of images or recordings.

    Args:
        source: a path.
        mixed: there may be other files as well; otherwise all files have to be of one medium.

    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return None
    common: Medium | None = None
    for path in _files(folder):
        medium = _medium_of_file(path)
        if mixed:
            common = common or medium
        elif medium is None or common not in (None, medium):
            return None
        else:
            common = medium
    return common


def _medium_of_file(path: Path) -> Medium | None:
    suffix = path.suffix.lower()
    for medium, suffixes in SUFFIXES.items():
        if suffix in suffixes:
            return medium
    return None


def classified(folder: Path, medium: Medium, split: str, account: Account) -> Iterator[tuple[Path, str]]:
    """Files and their classes, sorted; all others are recorded in the account.

    If the folder has one for the split, such as ``flowers/train/rose/1.jpg``, the files are those below it.
    """
    root = folder / split if (folder / split).is_dir() else folder
    for path in sorted(_files(folder)):
        name = path.relative_to(folder).as_posix()
        if not path.is_relative_to(root):
            account.leave_out("files", f"not of split {split}, see --split", name=name)
        elif path.suffix.lower() not in SUFFIXES[medium]:
            account.leave_out("files", f"no {medium}", name=name)
        elif path.parent == root:
            account.leave_out("files", "in no folder of a class", name=name)
        else:
            account.files += 1
            yield path, path.relative_to(root).parts[0]


def _files(folder: Path) -> Iterator[Path]:
    """Files below a folder, without hidden files; links to folders aren't followed."""
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(parent, name)
