"""Untrusted TOML text, read within limits, with the line of each key; and the job files that come with the package."""

from __future__ import annotations

import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hypha_ray.config.aliases import HABITS
from hypha_ray.config.keys import KeyPath, dotted
from hypha_ray.errors import ConfigError
from hypha_ray.files import as_installed, find_file, shipped_configs

MAX_BYTES = 2**20
MAX_DEPTH = 32
_LONGEST = 200
OTHER_FILES = (".yaml", ".yml", ".json")
"""Ends of the names of other tools' job files."""
_OTHER_ENTRY = re.compile(r"""^[\s{,-]{0,200}["']?([\w-]{1,64})["']?\s{0,9}:""", re.MULTILINE)
"""A key of YAML, or the first key of a line of JSON."""
_MOST_MEANINGS = 6
_SYNTAX = "see https://toml.io for the syntax"
_MODE_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Bits of a file's mode that let its group or others use it."""

_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.){0,200}"|'[^'\n]*')"""
_HEADER = re.compile(rf"\s*\[\[?\s*({_PART}(?:\s*\.\s*{_PART})*)\s*\]")
_ENTRY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")
_LONG_NAME = re.compile(rf"(?<![\w\\-])(?:{_PART}[ \t]*\.[ \t]*){{{MAX_DEPTH}}}")
"""Such a name takes tomllib quadratic time, so it is refused before parsing."""
_SENTENCE = re.compile(r".+?\.(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Document:
    """A job file: its name as given, its text and its parsed content."""

    file: str
    text: str
    table: dict[str, Any]
    private: bool
    """Whether only its owner may read it."""
    is_option: bool = False
    """Whether it stands for an option of the command line, whose value has keys of the job file."""

    def location(self, path: Sequence[str]) -> str:
        """``FILE:LINE`` of the key, or of the table or value that contains it."""
        return _location_in(self.text, self.file, path)


def read(file: str) -> Document:
    """Read a job file.

    Raises:
        ConfigError: CFG015 if it isn't a readable file; CFG005, CFG006 or CFG007 if its content is invalid.

    """
    content, mode = _bytes_and_mode(file)
    if len(content) > MAX_BYTES:
        problem = f"{file} is too large for a job file"
        raise ConfigError("CFG006", problem, "more", f"{MAX_BYTES} bytes", "keep data elsewhere")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise _unreadable(file, f"byte 0x{byte:02x} at offset {error.start}") from None
    offset = content.find(b"\0")
    if offset >= 0:
        raise _unreadable(file, f"byte 0x00 at offset {offset}")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if file.lower().endswith(OTHER_FILES):
        raise _of_another_tool(text, file)
    is_private = not mode & _MODE_OF_OTHERS
    return Document(file, text, parse(text, file), is_private)


def parse(text: str, location: str) -> dict[str, Any]:
    """Parse the TOML of a file; `location` is that of the text in error messages.

    Raises:
        ConfigError: CFG005 for its syntax, and the errors of `check`.

    """
    table = parse_unchecked(text, location)
    check(table, location, text)
    return table


def parse_unchecked(text: str, location: str) -> dict[str, Any]:
    """Parse TOML, without the errors of `check`."""
    if _LONG_NAME.search(text):
        raise _too_deep(location)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _too_deep(location) from None
    except ValueError as error:
        raise _bad_syntax(text, location, str(error)) from None


def _of_another_tool(text: str, file: str) -> ConfigError:
    """Error for a file that isn't TOML; it names the keys that are meant by the file's names."""
    meanings: list[str] = []
    for name in dict.fromkeys(_OTHER_ENTRY.findall(text)):
        key = HABITS.get(name.replace("-", "_"))
        if key is not None and len(meanings) < _MOST_MEANINGS:
            likely_keys = "` or `".join(key.split())
            meanings.append(f"{name} is `{likely_keys}`")
    fix = "write TOML, as in docs/configuration.md"
    if meanings:
        fix = f"{fix}: {', '.join(meanings)}"
    return ConfigError("CFG015", f"{file} isn't a TOML file", file.rpartition(".")[2].upper(), "TOML", fix)


def _bytes_and_mode(file: str) -> tuple[bytes, int]:
    path = find_file(file)
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as stream:
                return stream.read(MAX_BYTES + 1), mode
        reason = "a directory" if stat.S_ISDIR(mode) else "neither file nor directory"
    except FileNotFoundError as error:
        if path.name == file:
            raise _no_such_name(file) from None
        reason = str(error.strerror)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    problem = f"job file {dotted([file])} can't be read"
    raise ConfigError("CFG015", problem, reason, fix="give a TOML file after @")


def _no_such_name(file: str) -> ConfigError:
    """Error for a name without a folder that no job file has."""
    fix = "give a TOML file after @"
    names = list(shipped_configs())
    for match in get_close_matches(file.removesuffix(".toml"), names, n=1):
        fix = f"did you mean {match!r}?"
    problem = f"job file {dotted([file])} can't be read"
    allowed = f"a TOML file, or one of {', '.join(names)}"
    return ConfigError("CFG015", problem, "No such file or directory", allowed, fix)


def check(table: dict[str, Any], location: str, text: str = "") -> None:
    """Refuse valid TOML that no job file needs.

    Args:
        table: the content.
        location: location of it all in error messages.
        text: text of the file; empty if the location is more exact than a line.

    Raises:
        ConfigError: CFG006 too deep, CFG007 a text that no file can contain, CFG003 an integer beyond 64 bits.

    """
    values: list[tuple[object, KeyPath]] = [(table, ())]
    """Values to check, with their keys."""
    while values:
        value, path = values.pop()
        if len(path) > MAX_DEPTH:
            raise _too_deep(location)
        if isinstance(value, dict):
            for name, child in value.items():
                values.append((name, (*path, name)))
                values.append((child, (*path, name)))
        elif isinstance(value, list):
            values.extend((child, (*path, str(number))) for number, child in enumerate(value))
        elif isinstance(value, str) and ("\0" in value or value.encode(errors="ignore").decode() != value):
            raise _unreadable(_location_in(text, location, path), "a text with NUL or half a surrogate pair")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            key = f"{_location_in(text, location, path)}: {dotted(path)}" if text else f"{location}: an integer"
            raise ConfigError("CFG003", f"{key} is out of range", "more", "64 bits", "use a smaller one")


def _unreadable(location: str, got: str) -> ConfigError:
    return ConfigError("CFG007", f"{location} is not UTF-8 text without NUL", got=got, fix="save it as UTF-8")


def _too_deep(location: str) -> ConfigError:
    return ConfigError("CFG006", f"{location} is nested too deep", "more", f"{MAX_DEPTH} levels", "use fewer levels")


def _bad_syntax(text: str, location: str, reason: str) -> ConfigError:
    """Name the line, and for a double declaration the other line too."""
    position = re.search(r"^(.*) \(at (?:line (\d+), column \d+|end of document)\)$", reason)
    if position is None:
        first_clause = reason.partition(";")[0]
        raise ConfigError("CFG005", f"{location}: {first_clause[:_LONGEST]}", fix=_SYNTAX)
    problem = position[1][:_LONGEST]
    last_line = text.count("\n") + 1
    line = int(position[2] or last_line)
    entries = dict(_entries(text))
    for earlier_line, path in entries.items():
        if earlier_line < line and path == entries.get(line):
            problem = f"{dotted(path)} is declared twice, on lines {earlier_line} and {line}"
            break
    return ConfigError("CFG005", f"{location}:{line}: {problem}", fix=_SYNTAX)


def _entries(text: str) -> Iterator[tuple[int, KeyPath]]:
    """Lines that begin a table or set a key, with the full name; lines inside long strings may match by mistake."""
    header: KeyPath = ()
    lengths: Counter[KeyPath] = Counter()
    for line_number, line in enumerate(text.split("\n"), 1):
        if match := _HEADER.match(line):
            header = _numbered(_parts(match[1]), lengths)
            if line.lstrip().startswith("[["):
                lengths[header] += 1
                header = (*header, str(lengths[header] - 1))
            yield line_number, header
        elif match := _ENTRY.match(line):
            entry = header + _parts(match[1])
            yield line_number, entry


def _location_in(text: str, file: str, path: Sequence[str]) -> str:
    """``FILE:LINE`` of a key in the text of a file, or of the table or value that contains it."""
    depth = 0
    location = file
    for line, entry in _entries(text):
        common_length = _common_length(path, entry)
        if common_length > depth:
            depth = common_length
            location = f"{file}:{line}"
    return location


def _numbered(name: KeyPath, lengths: Mapping[KeyPath, int]) -> KeyPath:
    """A name with the number of the last table of each array in it."""
    path: KeyPath = ()
    for part in name:
        if path in lengths:
            last_number = lengths[path] - 1
            path = (*path, str(last_number))
        path = (*path, part)
    return path


def _parts(name: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in re.findall(_PART, name))


def _common_length(path: Sequence[str], entry: Sequence[str]) -> int:
    """Number of parts with which both begin."""
    length = 0
    for part, entry_part in zip(path, entry, strict=False):
        if part != entry_part:
            break
        length += 1
    return length


def config_lines() -> Iterator[str]:
    """Write a line for each job file: its name, and the first sentence about it."""
    files = shipped_configs()
    width = max(map(len, files))
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        yield f"{name.ljust(width)}  {first_sentence(text)}"


def first_sentence(text: str) -> str:
    """The first sentence of a job file's first comment; empty without one."""
    words = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        words.append(line.removeprefix("#").strip())
    sentence = _SENTENCE.match(" ".join(words))
    if sentence is None:
        return ""
    return sentence[0].removesuffix(".")


def shipped_config(name: str) -> str:
    """Text of a job file that comes with the package, with its commands as they are given here.

    Raises:
        ConfigError: CFG003, there is none of that name; the nearest is named.

    """
    files = shipped_configs()
    stem = name.removesuffix(".toml")
    if stem in files:
        return as_installed(files[stem].read_text(encoding="utf-8"))
    fix = "see the list without a name"
    for match in get_close_matches(stem, files, n=1):
        fix = f"did you mean {match!r}?"
    raise ConfigError("CFG003", "no such job file comes with hypha_ray", repr(name), ", ".join(files), fix)
