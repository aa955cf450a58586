"""Single settings from job files and flags, each with key, value and place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any

from hypha_ray.config.aliases import CONTAINERS, IGNORED, habit, habit_inside, own
from hypha_ray.config.document import Document, check, parse
from hypha_ray.config.keys import (
    EACH,
    Key,
    KeyPath,
    arrays,
    dotted,
    free_table,
    is_number,
    key_at,
    keys,
    nearest,
    schema_path,
    shown,
    tables,
)
from hypha_ray.errors import ConfigError

SWITCHES = ("dry-run", "resume", "help")
"""Flags that aren't keys of the job file."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value for a key; `raw` is the key as it was written, `document` is None for a flag."""

    path: KeyPath
    value: Any
    raw: KeyPath
    document: Document | None

    def inside(self, path: KeyPath) -> bool:
        """Whether the key is one of those in the table or array at a path."""
        return self.path[: len(path)] == path != self.path

    @property
    def where(self) -> str:
        """``FILE:LINE``, or the flag."""
        return _where(self.raw, self.document)

    @property
    def place(self) -> str:
        """``FILE:LINE: KEY``, or the flag, as the beginning of an error message."""
        return f"{self.where}: {dotted(self.path)}" if self.document else self.where


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A parsed command line."""

    files: tuple[str, ...]
    flags: tuple[Setting, ...]
    dry_run: bool
    resume: str | bool | None


def from_document(document: Document) -> list[Setting]:
    """The settings of a job file.

    Raises:
        ConfigError: CFG001 unknown key, CFG002 a value in place of a table, CFG005 a key under two of its names.

    """
    found: dict[KeyPath, Setting] = {}
    for setting in _walk(document.table, (), document):
        other = found.setdefault(setting.path, setting)
        if other is not setting:
            what = f"{setting.where}: {dotted(setting.raw)} and {dotted(other.raw)} are the same key"
            raise ConfigError("CFG005", what, fix="keep one of them")
    return list(found.values())


def from_arguments(arguments: Iterable[str]) -> CommandLine:
    """Parse a command line.

    Raises:
        ConfigError: CFG015 stray argument or missing value, CFG001 unknown flag, CFG102 a secret.

    """
    files: list[str] = []
    flags: list[Setting] = []
    dry_run = False
    resume = None
    rest = deque(arguments)
    while rest:
        word = rest.popleft()
        name, _, _ = word.partition("=")
        if word.startswith("@"):
            files.append(_file(word, rest))
        elif name in ("--dry-run", "--dry_run"):
            dry_run = _switch(word)
        elif name == "--resume":
            resume = value_behind(word, rest) or True
        elif name.startswith("--"):
            flags.extend(_from_flag(name, value_behind(word, rest)))
        elif _is_file(word):
            files.append(word)
        else:
            fix = "write -- before a key; a job file is a name that ends in .toml, or stands behind @"
            raise ConfigError("CFG015", f"unexpected argument {shown(name)}", fix=fix)
    return CommandLine(tuple(files), tuple(flags), dry_run, resume)


def merged(settings: Sequence[Setting]) -> dict[str, Any]:
    """Nested tables with the last setting of each key.

    Raises:
        ConfigError: CFG003 a number of a table in an array that leaves a gap.

    """
    tree = nested((setting.path, setting.value) for setting in settings)
    for setting in settings:
        for array in filter(setting.inside, arrays()):
            number = int(setting.path[len(array)])
            length = len(reduce(dict.__getitem__, array, tree))
            if number >= length:
                what = f"{setting.place}: the number leaves a gap in the array"
                raise ConfigError("CFG003", what, str(number), f"up to {length}", "count the tables from 0")
    return tree


def in_force(settings: Iterable[Setting]) -> list[Setting]:
    """Settings without those inside an array that a later one replaces."""
    kept: list[Setting] = []
    for setting in settings:
        if setting.path in arrays():
            kept = [earlier for earlier in kept if not earlier.inside(setting.path)]
        kept.append(setting)
    return kept


def nested(values: Iterable[tuple[KeyPath, Any]]) -> dict[str, Any]:
    """Nested tables with these values; numbered tables become arrays."""
    tree: dict[str, Any] = {}
    for path, value in values:
        put(tree, path, value)
    for *above, last in arrays():
        table = reduce(lambda inner, name: inner.get(name, {}), above, tree)
        if isinstance(numbered := table.get(last), dict):
            table[last] = [numbered[str(number)] for number in range(len(numbered)) if str(number) in numbered]
    return tree


def put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set one value in nested tables; an empty table doesn't replace one that exists."""
    *above, last = path
    for name in above:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    if value != {} or not isinstance(tree.get(last), dict):
        tree[last] = value


def _is_file(word: str) -> bool:
    """Whether a word without @ is a job file, as most tools take one."""
    try:
        return not word.startswith("-") and (word.endswith(".toml") or Path(word).is_file())
    except (OSError, ValueError):  # No file can have such a name.
        return False


def _file(word: str, rest: deque[str]) -> str:
    file = word[1:] or _next_value(rest)
    if not file:
        raise ConfigError("CFG015", "@ names no job file", fix="give a TOML file after @")
    return file


def value_behind(word: str, rest: deque[str]) -> str | None:
    """The value after ``=`` in a word, otherwise the next word; None if that is a flag or file, or missing."""
    _, given, text = word.partition("=")
    return text if given else _next_value(rest)


def _switch(word: str) -> bool:
    name, given, text = word.partition("=")
    if given and text not in ("true", "false"):
        raise ConfigError("CFG002", f"{name} has the wrong type", shown(text), "true | false", "leave the value out")
    return text != "false"


def _next_value(rest: deque[str]) -> str | None:
    return None if not rest or rest[0].startswith(("--", "@")) else rest.popleft()


def _from_flag(name: str, text: str | None) -> list[Setting]:
    raw = tuple(name.removeprefix("--").split("."))
    key = _known(raw, None)
    where = _where(raw, None)
    if key is None and len(raw) == 1 and text is not None and not text.startswith(("{", "[")):
        _refuse_habit(raw, text)
    if text is None:
        if key is None or bool not in key.types:
            raise ConfigError(
                "CFG015", f"{where} needs a value", allowed=key.kind if key else "a table", fix="see --help"
            )
        text = "true"
    value = from_text(key, text, where)
    for part in reversed(raw):
        value = {part: value}
    check(value, where)
    return list(_walk(value, (), None))


def _refuse_habit(raw: KeyPath, text: str) -> None:
    """Refuse a value for a table whose name other tools have for one key, such as ``--model gpt2``."""
    fix = habit(raw[0])
    if fix is not None:
        got = shown(_literal(text, _where(raw, None)))
        allowed = "a list of tables" if raw in arrays() else "a table"
        raise ConfigError("CFG002", f"{_where(raw, None)} has the wrong type", got, allowed, fix)


def from_text(key: Key | None, text: str, where: str) -> Any:
    """The value that a flag's text denotes."""
    if key and key.text:
        return text
    if key and key.many and not text.startswith("[") and text != "none":
        return [_literal(part.strip(), where) for part in text.split(",") if part.strip()]
    return _literal(text, where)


def _literal(text: str, where: str) -> Any:
    """The TOML value that a text denotes, or the text itself."""
    try:
        table = parse(f"value = {text}", where)
    except ConfigError as error:
        if error.code == "CFG005":
            return text
        raise
    return table["value"] if len(table) == 1 else text


def _walk(value: Any, raw: KeyPath, document: Document | None) -> Iterator[Setting]:
    key = _known(raw, document)
    path = own(raw)
    if schema_path(path) in arrays():
        yield from _walk_array(value, raw, document)
    elif path in IGNORED:
        yield Setting(path, value, raw, document)
    elif key is None or (free_table(path) and isinstance(value, dict)):
        if not isinstance(value, dict):
            place = Setting(path, value, raw, document).place
            raise ConfigError("CFG002", f"{place} has the wrong type", shown(value), "a table", "give it as a table")
        if key is not None:
            yield Setting(path, {}, raw, document)
        for name, child in value.items():
            yield from _walk(child, (*raw, name), document)
    elif key.secret and document is None:
        fix = "set HF_TOKEN, or write it into a job file of mode 0600"
        raise ConfigError("CFG102", f"{_where(raw, None)}: others can read a secret on the command line", fix=fix)
    else:
        absent = value == "none" and key.can_be_none and path == key.path
        yield Setting(path, None if absent else value, raw, document)


def _walk_array(value: Any, raw: KeyPath, document: Document | None) -> Iterator[Setting]:
    """An array takes the place of an earlier one, as any value does; a table with numbers for names changes those."""
    path = own(raw)
    if isinstance(value, list):
        yield Setting(path, [], raw, document)
        value = {str(number): table for number, table in enumerate(value)}
    if not isinstance(value, dict) or not all(map(is_number, value)):
        place = Setting(path, value, raw, document).place
        fix = f"begin each of them with [[{dotted(raw)}]]"
        raise ConfigError("CFG002", f"{place} has the wrong type", shown(value), "a list of tables", fix)
    for number, table in value.items():
        if isinstance(table, dict):
            yield Setting((*path, number), {}, (*raw, number), document)
        yield from _walk(table, (*raw, number), document)


def _known(raw: KeyPath, document: Document | None) -> Key | None:
    """The known key of that path; None for a table. A key inside a free table counts as that table."""
    path = own(raw)
    key = key_at(free_table(path) or path)
    known = tables().keys() | arrays() | IGNORED.keys()
    if key is None and schema_path(path) not in known and raw not in CONTAINERS:
        raise _unknown(raw, document)
    return key


def _unknown(raw: KeyPath, document: Document | None) -> ConfigError:
    path = own(raw)
    switch = get_close_matches(dotted(raw), SWITCHES, n=1) if document is None and not habit(raw[0]) else []
    if switch:
        return ConfigError("CFG001", f"unknown flag {_where(raw, None)}", fix=f"did you mean --{switch[0]}?")
    fix = habit(raw[0]) if document is None and len(raw) == 1 else None
    if fix is not None:
        return ConfigError("CFG001", f"unknown flag {_where(raw, None)}", fix=fix)
    meant = habit_inside(path) or nearest(path)
    table = schema_path(path[:-1])
    siblings = sorted(name[-1] for name in (*tables(), *keys()) if name and name[:-1] == table and name[-1] != EACH)
    what = f"{_where(raw, document)}: unknown key {dotted(raw)}" if document else f"unknown flag {_where(raw, None)}"
    if meant:
        return ConfigError("CFG001", what, fix=f"did you mean `{meant}`?")
    return ConfigError("CFG001", what, allowed=", ".join(siblings), fix="see --help")


def _where(raw: KeyPath, document: Document | None) -> str:
    return document.where(raw) if document else f"--{dotted(raw)}"
