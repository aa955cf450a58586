"""Untrusted TOML text, read within limits, with the line of each key."""

from __future__ import annotations

import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypha_ray.config.keys import KeyPath, dotted
from hypha_ray.errors import ConfigError
from hypha_ray.files import find_file

MAX_BYTES = 2**20
MAX_DEPTH = 32
_LONGEST = 200
_SYNTAX = "see https://toml.io for the syntax"

_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.){0,200}"|'[^'\n]*')"""
_HEADER = re.compile(rf"\s*\[\[?\s*({_PART}(?:\s*\.\s*{_PART})*)\s*\]")
_ENTRY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")
_LONG_NAME = re.compile(rf"(?<![\w\\-])(?:{_PART}[ \t]*\.[ \t]*){{{MAX_DEPTH}}}")
"""Such a name takes tomllib quadratic time, so it is refused before parsing."""


@dataclass(frozen=True, slots=True)
class Document:
    """A job file: its name as given, its text and its parsed content."""

    file: str
    text: str
    table: dict[str, Any]
    private: bool
    """Whether only its owner may read it."""

    def where(self, path: Sequence[str]) -> str:
        """``FILE:LINE`` of the key, or of the table or value that contains it."""
        depths = [(_common(path, entry), -line) for line, entry in _entries(self.text)]
        depth, line = max(depths, default=(0, 0))
        return f"{self.file}:{-line}" if depth else self.file


def read(file: str) -> Document:
    """Read a job file.

    Raises:
        ConfigError: CFG015 if it isn't a readable file; CFG005, CFG006 or CFG007 if its content is invalid.

    """
    raw, mode = _raw(file)
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            "CFG006", f"{file} is too large for a job file", "more", f"{MAX_BYTES} bytes", "keep data elsewhere"
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _unreadable(file, f"byte 0x{raw[error.start]:02x} at offset {error.start}") from None
    if (offset := raw.find(b"\0")) >= 0:
        raise _unreadable(file, f"byte 0x00 at offset {offset}")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    return Document(file, text, parse(text, file), private=not mode & (stat.S_IRWXG | stat.S_IRWXO))


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; `where` is its place in error messages.

    Raises:
        ConfigError: CFG005 for its syntax, and the errors of `check`.

    """
    if _LONG_NAME.search(text):
        raise _too_deep(where)
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise _bad_syntax(text, where, str(error)) from None
    check(table, where)
    return table


def _raw(file: str) -> tuple[bytes, int]:
    path = find_file(file)
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as stream:
                return stream.read(MAX_BYTES + 1), mode
        reason = "a directory" if stat.S_ISDIR(mode) else "neither file nor directory"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError("CFG015", f"job file {dotted([file])} can't be read", reason, fix="give a TOML file after @")


def check(table: dict[str, Any], where: str) -> None:
    """Refuse valid TOML that no job file needs.

    Raises:
        ConfigError: CFG006 too deep, CFG007 a text that no file can contain, CFG003 an integer beyond 64 bits.

    """
    todo: list[tuple[object, int]] = [(table, 0)]
    while todo:
        value, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(where)
        if isinstance(value, dict):
            todo.extend((child, depth + 1) for pair in value.items() for child in pair)
        elif isinstance(value, list):
            todo.extend((child, depth + 1) for child in value)
        elif isinstance(value, str) and ("\0" in value or value.encode(errors="ignore").decode() != value):
            raise _unreadable(where, "a text with NUL or half a surrogate pair")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError("CFG003", f"{where}: an integer is out of range", "more", "64 bits", "use a smaller one")


def _unreadable(where: str, got: str) -> ConfigError:
    return ConfigError("CFG007", f"{where} is not UTF-8 text without NUL", got=got, fix="save it as UTF-8")


def _too_deep(where: str) -> ConfigError:
    return ConfigError("CFG006", f"{where} is nested too deep", "more", f"{MAX_DEPTH} levels", "use fewer levels")


def _bad_syntax(text: str, where: str, reason: str) -> ConfigError:
    """Name the line, and for a double declaration the other line too."""
    position = re.search(r"^(.*) \(at (?:line (\d+), column \d+|end of document)\)$", reason)
    if position is None:
        raise ConfigError("CFG005", f"{where}: {reason.split(';', maxsplit=1)[0][:_LONGEST]}", fix=_SYNTAX)
    what = position[1][:_LONGEST]
    line = int(position[2] or text.count("\n") + 1)
    entries = dict(_entries(text))
    first = next((number for number, path in entries.items() if number < line and path == entries.get(line)), None)
    if first is not None:
        what = f"{dotted(entries[line])} is declared twice, on lines {first} and {line}"
    return ConfigError("CFG005", f"{where}:{line}: {what}", fix=_SYNTAX)


def _entries(text: str) -> Iterator[tuple[int, KeyPath]]:
    """Lines that begin a table or set a key, with the full name; lines inside long strings may match by mistake."""
    header: KeyPath = ()
    lengths: Counter[KeyPath] = Counter()
    for number, line in enumerate(text.split("\n"), 1):
        if match := _HEADER.match(line):
            header = _numbered(_parts(match[1]), lengths)
            if line.lstrip().startswith("[["):
                lengths[header] += 1
                header = (*header, str(lengths[header] - 1))
            yield number, header
        elif match := _ENTRY.match(line):
            yield number, header + _parts(match[1])


def _numbered(name: KeyPath, lengths: Mapping[KeyPath, int]) -> KeyPath:
    """A name with the number of the last table of each array in it."""
    path: KeyPath = ()
    for part in name:
        path = (*path, str(lengths[path] - 1), part) if path in lengths else (*path, part)
    return path


def _parts(name: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in re.findall(_PART, name))


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    same = [one == other for one, other in zip(left, right, strict=False)]
    return [*same, False].index(False)
