"""Files of a corpus: texts of a folder, and images or recordings in a folder for each class, as ``flowers/rose/1.jpg``.

Nothing heavy is imported.
"""

from __future__ import annotations

import codecs
import io
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeAlias

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

BY_PANDAS: Final = "write it by pandas as `to_json(FILE, orient='records', lines=True)`"
"""Remedy for other forms of pandas."""
_SPLITS: Final = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
"""Usual names of files with a split each."""
_CHUNK = 1 << 20
_EARLY = 1 << 13
Medium: TypeAlias = Literal["images", "recordings"]

SUFFIXES: Final[dict[Medium, frozenset[str]]] = {
    "images": frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}),
    "recordings": frozenset({".wav", ".flac", ".ogg", ".oga", ".mp3"}),
}
"""Suffixes of files, in lower case."""


def kind_of(path: Path) -> str:
    """The suffix for the type of a file: ``.csv`` for ``a.CSV.gz``."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        return path.with_suffix("").suffix.lower()
    return suffix


def require_rows(record: Any, path: Path) -> None:
    """Refuse the only object of a JSON file that has columns or numbered rows, as pandas writes them, and no fields.

    Raises:
        DataError: DATA032.

    """
    if not isinstance(record, dict) or not record:
        return
    inner = list(record.values())
    is_nested = all(isinstance(value, dict) and value.keys() == inner[0].keys() for value in inner)
    is_numbered = is_nested and (all(map(str.isdecimal, record)) or all(map(str.isdecimal, inner[0])))
    has_lines = kind_of(path) != ".json"  # An only line is a row.
    is_by_columns = is_nested or _has_columns(inner)
    if is_numbered or (is_by_columns and not has_lines) or record.keys() >= {"columns", "data"}:
        problem = f"{path} has its rows in one object, by columns or by numbers"
        raise DataError("DATA032", problem, allowed="an object for each row", fix=BY_PANDAS)


def _has_columns(values: Sequence[Any]) -> bool:
    """Whether values are lists of one length, and not those of a chat, which has objects."""
    if not all(isinstance(value, list) and len(value) == len(values[0]) > 0 for value in values):
        return False
    return not any(isinstance(item, dict) for item in chain.from_iterable(values))


def split_names(files: Iterable[Path]) -> list[str]:
    """Names of files that are named after different splits, such as train.jsonl and test.jsonl; empty without them."""
    names: dict[str, str] = {}
    for path in files:
        split = path.name.partition(".")[0].lower()
        if split in _SPLITS:
            names[split] = path.name
    return sorted(names.values()) if len(names) > 1 else []


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
    is_empty = True
    try:
        with opened(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                if is_empty and is_text and b"\0" in chunk[:_EARLY]:
                    return "binary"
                is_empty = False
                if not is_text:
                    break
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    except UNREADABLE as error:
        problem = getattr(error, "strerror", None) or "damaged"
        return f"can't be read, {problem}"
    return "empty" if is_empty else ""


def _relative(path: Path, folder: Path) -> str:
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    return str(path)


def medium_of(source: str, mixed: bool) -> Medium | None:
    """The medium of a folder's files; None if it isn't a folder of images or recordings.

    Args:
        source: a path.
        mixed: there may be other files as well; otherwise all files have to be of one medium.

    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return None
    common_medium: Medium | None = None
    for path in _files(folder):
        medium = _medium_of_file(path)
        if mixed:
            common_medium = common_medium or medium
        elif medium is None or common_medium not in (None, medium):
            return None
        else:
            common_medium = medium
    return common_medium


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
