"""Files of a corpus: finding the text files of a folder, and opening them."""

from __future__ import annotations

import codecs
import io
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import fsspec

from hypha_ray.data.provenance import Account
from hypha_ray.errors import DataError

PIECE_CHARACTERS = 1 << 16
"""Length in characters of the documents into which a longer text file is cut, at line ends."""
_LEAST_CHARACTERS = 1 << 11
_LEAST_PIECES = 64
"""Number of documents into which a single text is cut at least, so that a few can be held out."""

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4"}
ARROW = frozenset({".parquet", ".arrow", ".feather"})
"""Suffixes of tables in Arrow's forms."""
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of a file that is damaged or can't be read."""

_CHUNK = 1 << 20
_EARLY = 1 << 13


def kind_of(path: Path) -> str:
    """The suffix for the type of a file: ``.csv`` for ``a.CSV.gz``."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        return path.with_suffix("").suffix.lower()
    return suffix


def opened(path: Path, mode: str, **options: Any) -> Any:
    """The open file, decompressed; `options` are those of Python's `open`."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression in ("zstd", "lz4"):  # Python's library lacks them, and Arrow has them.
        return _opened_by_arrow(path, mode, compression, options)
    return fsspec.open(str(path), mode, compression=compression, **options)


def _opened_by_arrow(path: Path, mode: str, compression: str | None, options: Mapping[str, Any]) -> Any:
    """The open file, decompressed by Arrow."""
    import pyarrow

    # Opened here, since Arrow accepts only names in UTF-8.
    stream = pyarrow.CompressedInputStream(path.open("rb"), compression)
    return io.TextIOWrapper(io.BufferedReader(stream), **options) if "t" in mode else stream


def pieces(file: IO[str], characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """A text in pieces of about that length, cut at line ends."""
    while lines := file.readlines(characters):
        yield "".join(lines)


def lone_piece_characters(path: Path) -> int:
    """Length in characters of the pieces of a source's only text."""
    characters = path.stat().st_size // _LEAST_PIECES
    return min(PIECE_CHARACTERS, max(_LEAST_CHARACTERS, characters))


def walk(folder: Path, account: Account) -> list[Path]:
    """The regular files below a folder, sorted; links and unreadable folders are recorded in the account."""
    files: list[Path] = []

    def leave_out(plural: str, reason: str, path: Path) -> None:
        account.leave_out(plural, reason, name=_relative(path, folder))

    def leave_out_unreadable(error: OSError) -> None:
        leave_out("folders", "can't be read", Path(error.filename or folder))

    for parent_name, subfolders, names in os.walk(folder, onerror=leave_out_unreadable):
        parent = Path(parent_name)
        for name in sorted(subfolders):
            if name.startswith("."):
                leave_out("folders", "hidden", parent / name)
            elif (parent / name).is_symlink():
                leave_out("folders", "links, which are not followed", parent / name)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in sorted(names):
            if name.startswith("."):
                leave_out("files", "hidden", parent / name)
            elif not (parent / name).is_file():
                leave_out("files", "not regular files", parent / name)
            else:
                files.append(parent / name)
    return sorted(files)


def texts_among(files: Iterable[Path], folder: Path, account: Account) -> Iterator[Path]:
    """The files that can be read as text or tables; the others are recorded in the account."""
    for path in files:
        reason = why_unreadable(path)
        if reason:
            account.leave_out("files", reason, name=_relative(path, folder))
        else:
            yield path


def leave_out_file(path: Path, folder: Path, error: DataError, account: Account) -> None:
    """Record a file that turned out to be damaged, or to have no text."""
    if error.code == "DATA032":
        account.leave_out("files", "no text column", name=f"{_relative(path, folder)} has {error.got}")
    else:
        account.leave_out("files", "damaged", name=_relative(path, folder))


def is_binary(path: Path) -> bool:
    """Whether there is a zero byte near the beginning of a file, which is git's rule."""
    with opened(path, "rb") as file:
        return b"\0" in file.read(_EARLY)


def why_unreadable(path: Path) -> str:
    """Reason that a file can't be read; empty if it can. The whole file is read, so no part of a bad file is used."""
    is_text = kind_of(path) not in ARROW
    decoder = codecs.getincrementaldecoder("utf-8")()
    empty = True
    try:
        with opened(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                if empty and is_text and b"\0" in chunk[:_EARLY]:
                    return "binary"
                empty = False
                if not is_text:
                    break
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    except UNREADABLE as error:
        problem = getattr(error, "strerror", None) or "damaged"
        return f"can't be read, {problem}"
    return "empty" if empty else ""


def _relative(path: Path, folder: Path) -> str:
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    return str(path)
