"""The files of a run: JSON lines that are written at once, and whole JSON files.

Other sinks may lose records; these files don't.
"""

from __future__ import annotations

import errno
import gc
import json
import math
import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import pydantic_core

from hypha_ray.files import opener
from hypha_ray.texts import redacted

Record: TypeAlias = Mapping[str, Any]
"""A record of metrics or an event: JSON-able, with a `kind`. docs/telemetry.md lists every field with its unit."""

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
ROLLOUTS = "rollouts.jsonl"
SUMMARY = "summary.json"
_REPEATED = frozenset({"step", "round", "eval"})
"""Kinds of records that are written again when a round is trained again."""
_BLOCK_BYTES = 1 << 16
"""Bytes that are read at once from the end of a file."""
STEPS_BYTES = 64 << 20
"""Size of a file of metrics up to which the reports of workers are read for the norms of gradients."""


def plain(value: object) -> Any:
    """Convert to JSON's types: numbers that aren't finite become None, other objects their text.

    Secrets of URLs are removed from texts.
    """
    match value:
        case None | bool():
            return value
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            number = float(value)
            return number if math.isfinite(number) else None
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _:
            return redacted(str(value))


def stamped(event: Record) -> Record:
    """Return a record or an event with the time of day; their sources have only a monotonic clock."""
    return {"wall_time": datetime.now(UTC).isoformat(timespec="milliseconds"), **event}


class JsonLines:
    """Appends records to a file, one object per line; unbuffered, so a killed process loses none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "ab", opener=opener)
        if _ends_inside_a_line(path):
            self._file.write(b"\n")  # A writer was killed within a line: the next record gets a line of its own.

    def write(self, record: Record) -> None:
        """Append one record; NaN and infinity become null, fields keep their order.

        Raises:
            OSError: the disk is full or gone.

        """
        line = _encoded(plain(record)) + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not path.is_file() or file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class NewRecords:
    """Records that are appended to a JSON lines file from now on; the file may not exist yet.

    Args:
        path: the file.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = self._size()
        """Number of bytes that have been read."""

    def read(self) -> list[dict[str, Any]]:
        """Return the records of all complete lines since the last call; lines that were cut off since are forgotten."""
        self._end = min(self._end, self._size())
        if self._size() == self._end:
            return []
        with self._path.open("rb") as file:
            file.seek(self._end)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._end += len(complete) + len(newline)
        parsed = [_parsed(line) for line in complete.splitlines()]
        return [record for record in parsed if record is not None]

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def read_jsonl(path: Path, kinds: Iterable[str] | None = None, end: int | None = None) -> list[dict[str, Any]]:
    """Read the records of a JSON lines file.

    A missing file has none. Lines that aren't a JSON object are skipped: they may be incomplete, because the writer was
    killed or is still writing.

    Args:
        path: the file.
        kinds: kinds of the records to read; None: all.
        end: number of bytes to read; None: the whole file.

    """
    if not path.exists():
        return []
    records = []
    with path.open("rb") as file, _no_collections():
        lines: Iterable[bytes] = file if end is None else file.read(end).splitlines()
        if kinds is not None:
            kinds = set(kinds)
            lines = filter(_mention_of(kinds).search, lines)
        for line in lines:
            record = _parsed(line)
            if record is not None and (kinds is None or record.get("kind") in kinds):
                records.append(record)
    return records


def read_tail(path: Path, size_bytes: int) -> list[dict[str, Any]]:
    """Read the records at the end of a JSON lines file, in its last bytes; a line that begins before them is left out.

    Raises:
        OSError: the file can't be read.

    """
    records = []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
        for line in file:
            record = _parsed(line)
            if record is not None:
                records.append(record)
    return records


def newest_records(path: Path, kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read the last record of each kind, from the end of the file on; a kind without records is missing.

    Raises:
        OSError: the file is there and can't be read.

    """
    latest_records: dict[str, dict[str, Any]] = {}
    kinds = set(kinds)
    mention = _mention_of(kinds)
    if not path.exists():
        return latest_records
    for line in _lines_backwards(path):
        if not mention.search(line):
            continue
        record = _parsed(line) or {}
        kind = record.get("kind")
        if kind in kinds:
            latest_records.setdefault(kind, record)
        if len(latest_records) == len(kinds):
            break
    return latest_records


def records_in_turn(path: Path, kind: str, backwards: bool = False) -> Iterator[dict[str, Any]]:
    """Read the records of a kind one by one, as far as the caller goes on: from the first one, or from the last one.

    Raises:
        OSError: the file can't be read.

    """
    mention = _mention_of((kind,))
    lines = _lines_backwards(path) if backwards else _lines(path)
    for line in filter(mention.search, lines):
        record = _parsed(line) or {}
        if record.get("kind") == kind:
            yield record


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, the first one first."""
    with path.open("rb") as file:
        yield from file


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Lines of a file, the last one first."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        beginning = b""
        while position > 0:
            block_bytes = min(_BLOCK_BYTES, position)
            position -= block_bytes
            file.seek(position)
            block = file.read(block_bytes) + beginning
            beginning, *lines = block.split(b"\n")
            yield from reversed(lines)
        yield beginning


def _mention_of(kinds: Iterable[str]) -> re.Pattern[bytes]:
    """Pattern that every line with a record of these kinds has; it is much faster than to parse all lines."""
    names = "|".join(map(re.escape, sorted(kinds)))
    return re.compile(rf'"kind"\s*:\s*"(?:{names})"'.encode())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = pydantic_core.from_json(line)
    except ValueError:  # A cut line, or one that only Python's parser takes, as with bytes that aren't UTF-8.
        value = _parsed_by_python(line)
    return value if isinstance(value, dict) else None


def _parsed_by_python(line: bytes) -> Any:
    """Value of a line; None if it is torn, or nested deeper than the parser goes."""
    try:
        return json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None


@contextmanager
def _no_collections() -> Iterator[None]:
    """Spare the garbage collector many records, which have no cycles; it would take half of the time to read them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rewind(path: Path, next_round: int) -> None:
    """Drop the records of `next_round` and of all later rounds, which will be trained again.

    The file is replaced atomically. No process may have it open for writing.

    Raises:
        OSError: the disk is full or can't be written; the file is as it was.

    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    earlier_lines = [line for line in lines if not _is_of_a_round_from(next_round, line)]
    if len(earlier_lines) < len(lines):
        _replace(path, b"".join(earlier_lines))


def _is_of_a_round_from(first_round: int, line: bytes) -> bool:
    record = _parsed(line) or {}
    round_number = record.get("round")
    return record.get("kind") in _REPEATED and isinstance(round_number, int) and round_number >= first_round


def uncommitted_s(directory: Path, totals: Record) -> float:
    """Seconds of training that the records of a run's last attempt have after its last commit, before they are dropped.

    Args:
        directory: the run directory.
        totals: totals of the run at the last commit.

    Returns:
        0 after an attempt that has ended well: it has accounted for all its time.

    """
    ends = read_jsonl(directory / EVENTS, kinds=("attempt", "fleet_time"))
    if ends and ends[-1]["kind"] == "fleet_time":
        return 0.0
    records = read_jsonl(directory / METRICS, kinds=_REPEATED)
    elapsed_s = (record["elapsed_s"] for record in records if record.get("elapsed_s") is not None)
    committed_s = float(totals.get("elapsed_s", 0.0))
    return max(0.0, max(elapsed_s, default=0.0) - committed_s)


def since_first_attempt_s(directory: Path) -> float:
    """Seconds by the clock since the run's first attempt began; 0 before."""
    attempts = read_jsonl(directory / EVENTS, kinds=("attempt",))
    if not attempts:
        return 0.0
    began_at = datetime.fromisoformat(attempts[0]["wall_time"])
    return max(0.0, (datetime.now(UTC) - began_at).total_seconds())


def write_json(path: Path, value: object) -> None:
    """Write a JSON file so that a reader sees the old content or the new one, never a part."""
    _replace(path, _encoded(plain(value), indent=2) + b"\n")


def _encoded(value: object, indent: int | None = None) -> bytes:
    """Strict JSON in UTF-8; a name that isn't UTF-8 has escapes for the bytes that aren't."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)
    return text.encode(errors="backslashreplace")


def _replace(path: Path, content: bytes) -> None:
    draft_file = path.with_name(f".{path.name}.part")
    with open(draft_file, "wb", opener=opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft_file.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a file that is missing or damaged has no fields."""
    if not path.exists():
        return {}
    return _parsed(path.read_bytes()) or {}


def by_round(records: Iterable[Record], kind: str) -> list[Record]:
    """Sort the records of a kind by round; of a round that was trained again after a crash, take the last."""
    latest_records: dict[int, Record] = {}
    for record in of_kind(records, kind):
        if isinstance(record.get("round"), int):
            latest_records[record["round"]] = record
    return [latest_records[round_number] for round_number in sorted(latest_records)]


def of_kind(records: Iterable[Record], *kinds: str) -> list[Record]:
    """Return the records of some kinds, as they came."""
    return [record for record in records if record.get("kind") in kinds]


def kinds_to_read(path: Path) -> tuple[str, ...]:
    """Kinds of the records of a file of metrics that are read for plots; of a large file no reports of workers."""
    if path.exists() and path.stat().st_size > STEPS_BYTES:
        return ("round", "eval")
    return ("round", "eval", "step")
