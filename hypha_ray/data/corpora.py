"""Where documents come from: Python's own sources, files, Hugging Face datasets; and images from scikit-learn.

Every source gives its documents in the same order each time, one after the other, so that a corpus of any size fits.
"""

from __future__ import annotations

import difflib
import json
import lzma
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from hypha_ray.data.options import Options
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import DataError, HyphaError

PIECE_CHARACTERS = 1 << 16
"""A longer text file is cut at line ends into documents of about this length."""

_COMPRESSED = {".gz", ".bz2", ".xz"}
_JSON = {".jsonl", ".ndjson", ".json"}
_HUB_FILES = {".parquet", ".arrow"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def documents(options: Options) -> Iterator[str]:
    """The texts of a source; empty ones are left out.

    Raises:
        DataError: there is no such source, or it is damaged.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    for text in _source(options):
        if text:
            # JSON can spell half of a surrogate pair, which isn't text.
            yield text if text.isascii() else text.encode("utf-8", "replace").decode()


def digits() -> Arrays:
    """The 1797 digits of scikit-learn: images ``[N, 1, 8, 8]`` from 0 to 1, labels ``[N]``."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[:, np.newaxis]
    return {"images": images, "labels": bunch.target.astype(np.int64)}


def _source(options: Options) -> Iterable[str]:
    source = options.source
    if source == "stdlib":
        return _standard_library()
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, options)
    if path.exists():
        return _file(path, options)
    if set(source) & set("*?["):
        return (text for file in _matches(path) for text in _file(file, options))
    if path.suffix in _JSON | _HUB_FILES | _COMPRESSED | {".txt"} or not _HUB_NAME.fullmatch(source):
        raise DataError("DATA030", f"there is no file or folder {source}", fix=_near(path))
    return _hub(source, options)


def _matches(pattern: Path) -> list[Path]:
    try:
        found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
        files = sorted(path for path in found if path.is_file())
    except ValueError as error:
        raise DataError("DATA030", f"{pattern} is no pattern", str(error), "* ? [ ], and ** for all folders") from None
    if not files:
        raise DataError("DATA030", f"no file matches {pattern}", fix="quote the pattern, and try it with ls")
    return files


def _standard_library() -> Iterator[str]:
    """Each module of the running interpreter's library is a document; some test modules are no UTF-8 on purpose."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for file in files:
        if not {"site-packages", "dist-packages"} & set(Path(file).parts):
            try:
                yield (root / file).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def _folder(folder: Path, options: Options) -> Iterable[str]:
    """A dataset in the layout of the hub, or loose files: hidden and binary ones are left out."""
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder)))
    if saved or any(path.suffix in _HUB_FILES for path in files):
        return _hub(str(folder), options, saved)
    texts = [path for path in files if path.suffix in _COMPRESSED or not _binary(path)]
    if not texts:
        raise DataError("DATA030", f"{folder} holds no text, JSONL or Parquet files", fix="name another --source")
    return (text for path in texts for text in _file(path, options))


def _file(path: Path, options: Options) -> Iterator[str]:
    kind = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    try:
        if kind == ".parquet":
            yield from _parquet(path, options.text_column)
            return
        with fsspec.open(str(path), "rt", encoding="utf-8-sig", compression="infer") as file:
            yield from _json_lines(file, path, options.text_column) if kind in _JSON else _pieces(file)
    except UnicodeDecodeError as error:
        fix = "convert it, or name the files to read by a pattern such as 'DIR/**/*.txt'"
        raise DataError("DATA031", f"{path} isn't UTF-8 text", error.reason, "UTF-8", fix) from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError("DATA031", f"{path} can't be read", reason, fix="copy it afresh") from None


def _pieces(file: Any) -> Iterator[str]:
    while lines := file.readlines(PIECE_CHARACTERS):
        yield "".join(lines)


def _json_lines(file: Iterable[str], path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                fix = "write one object a line, without line breaks inside"
                raise DataError("DATA031", f"{path}, line {number}: no JSON", str(error), "an object", fix) from None
            if not isinstance(record, dict):
                raise DataError("DATA031", f"{path}, line {number}: no JSON object", type(record).__name__, "an object")
            yield _text(record, column, f"{path}, line {number}")


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise _no_column(str(path), column, names)
            for batch in file.iter_batches(columns=[column], batch_size=1024):
                yield from (_text(record, column, str(path)) for record in batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise DataError("DATA031", f"{path} is no Parquet file", str(error), fix="copy it afresh") from None


def _hub(name: str, options: Options, saved: bool = False) -> Iterator[str]:
    """A Hugging Face dataset by name, or a local folder in that form; the hub's is streamed, not downloaded."""
    import datasets

    from hypha_ray.data.hub import explain

    datasets.disable_progress_bars()
    try:
        if saved:
            loaded = datasets.load_from_disk(name)
            rows = loaded[options.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(
                name, options.subset, split=options.split, revision=options.revision, streaming=True
            )
        for row in rows:
            yield _text(row, options.text_column, f"dataset {name!r}")
    except (HyphaError, GeneratorExit):
        raise
    except Exception as error:
        raise explain(error, name, _near(Path(name), "stdlib", "digits")) from error


def _text(record: dict[str, Any], column: str, where: str) -> str:
    """The text of a record; a null is an empty one."""
    if column not in record:
        raise _no_column(where, column, list(record))
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise DataError("DATA031", f"{where}: column {column!r} isn't text", type(text).__name__, "text")
    return text or ""


def _no_column(where: str, column: str, names: list[str]) -> DataError:
    found = ", ".join(sorted(names)) or "no columns"
    return DataError("DATA032", f"{where} has no column {column!r}", found, fix="name one with --text-column")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _binary(path: Path) -> bool:
    """Git's rule: a zero byte early in the file. What can't be opened is left for the reader to complain about."""
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(8192)
    except OSError:
        return False


def _near(path: Path, *others: str) -> str:
    """What the user may have meant."""
    names = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*others, *names], n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else "give stdlib, digits, a path, or a Hugging Face name"
