"""Single settings from job files and flags, each with key, value and place."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any

from hypha_ray.config.aliases import CONTAINERS, IGNORED, canonical, habit, habit_in_table, habit_inside
from hypha_ray.config.document import OTHER_FILES, Document, check, parse_unchecked
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
    similar_sibling,
    tables,
)
from hypha_ray.errors import ConfigError

SWITCHES = ("dry-run", "resume", "help")
_FILE_FLAGS = ("-c", "-f")
"""Flags that aren't keys of the job file."""
LENGTHS: dict[KeyPath, KeyPath] = {
    ("rounds", "epochs"): ("rounds", "update_rounds"),
    ("rounds", "update_rounds"): ("rounds", "epochs"),
}
"""Keys that give a run's length, each with the one that it replaces if that stands in an earlier place."""


INPUTS: frozenset[KeyPath] = frozenset(
    {
        ("dataset", "path"),
        ("dataset", "mix", EACH, "path"),
        ("model", "repository"),
        ("preprocessor", "repository"),
        ("rl", "reward", "model", "repository"),
        ("bridge", "certificate"),
        ("bridge", "key"),
    }
)
"""Keys that may name a file or folder which has to exist; otherwise the value is a name of something else."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value for a key; `written` is the key as it was written, `document` is None for a flag."""

    path: KeyPath
    value: Any
    written: KeyPath
    document: Document | None

    def is_below(self, path: KeyPath) -> bool:
        """Whether the key is one of those in the table or array at a path."""
        return self.path[: len(path)] == path != self.path

    @property
    def is_absent(self) -> bool:
        """Whether the value says that the key has none."""
        return self.value is None

    def replaces(self, earlier: Setting) -> bool:
        """Whether an earlier setting, of another file or before the flags, gives a run's length by the other key."""
        return earlier.path == LENGTHS.get(self.path) and earlier.document is not self.document

    @property
    def location(self) -> str:
        """``FILE:LINE``, or the flag."""
        return _location(self.written, self.document)

    @property
    def key_location(self) -> str:
        """``FILE:LINE: KEY``, or the flag, as the beginning of an error message."""
        if self.document is None:
            return self.location
        return f"{self.location}: {dotted(self.path)}"


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
    settings: dict[KeyPath, Setting] = {}
    for setting in _walk(document.table, (), document):
        earlier = settings.setdefault(setting.path, setting)
        if earlier is not setting:
            problem = f"{dotted(setting.written)} and {dotted(earlier.written)} are the same key"
            raise ConfigError("CFG005", f"{setting.location}: {problem}", fix="keep one of them")
    return list(settings.values())


def from_arguments(arguments: Iterable[str], option: str | None = None) -> CommandLine:
    """Parse a command line.

    Args:
        arguments: the words.
        option: option whose value the flags were, which errors name; None: they stood for themselves.

    Raises:
        ConfigError: CFG015 stray argument or missing value, CFG001 unknown flag, CFG102 a secret.

    """
    files: list[str] = []
    flags: list[Setting] = []
    dry_run = False
    resume = None
    words = deque(arguments)
    document = None if option is None else Document(option, "", {}, private=False, is_option=True)
    while words:
        word = words.popleft()
        name, _, _ = word.partition("=")
        if word.startswith("@"):
            files.append(_file(word, words))
        elif name in ("--dry-run", "--dry_run"):
            dry_run = _switch(word)
        elif name == "--resume":
            resume = value_behind(word, words) or True
        elif name.startswith("--"):
            flags.extend(_from_flag(name, value_behind(word, words), document))
        elif _is_file(word):
            files.append(word)
        else:
            fix = "write -- before a key; a job file is a name that ends in .toml, or stands behind @"
            if name in _FILE_FLAGS or name.endswith(OTHER_FILES):
                fix = "give a TOML file behind @: `@ job.toml`; see docs/configuration.md"
            if flags and isinstance(flags[-1].value, list) and len(flags[-1].value) > 0:
                fix = f"write the elements of a list with commas between them, behind {flags[-1].location}"
            raise ConfigError("CFG015", f"unexpected argument {shown(name)}", fix=fix)
    return CommandLine(tuple(files), tuple(flags), dry_run, resume)


def merged(settings: Sequence[Setting]) -> dict[str, Any]:
    """Nested tables with the last setting of each key.

    Raises:
        ConfigError: CFG003 a number of a table in an array that leaves a gap.

    """
    tree = nested((setting.path, setting.value) for setting in settings)
    for setting in settings:
        for array in filter(setting.is_below, arrays()):
            number = int(setting.path[len(array)])
            length = len(reduce(dict.__getitem__, array, tree))
            if number >= length:
                problem = f"{setting.key_location}: the number leaves a gap in the array"
                raise ConfigError("CFG003", problem, str(number), f"up to {length}", "count the tables from 0")
    return tree


def in_force(settings: Iterable[Setting]) -> list[Setting]:
    """Settings without those that a later one replaces: inside an array, or by another key of the same meaning.

    Two keys of one file, or of the command line, replace each other in no order: they are a conflict.
    """
    effective: list[Setting] = []
    for setting in settings:
        if setting.path in arrays():
            effective = [earlier for earlier in effective if not earlier.is_below(setting.path)]
        if setting.path in LENGTHS and not setting.is_absent:
            effective = [earlier for earlier in effective if not setting.replaces(earlier)]
        effective.append(setting)
    return effective


def nested(values: Iterable[tuple[KeyPath, Any]]) -> dict[str, Any]:
    """Nested tables with these values; numbered tables become arrays."""
    tree: dict[str, Any] = {}
    for path, value in values:
        put(tree, path, value)
    for *parents, last_name in arrays():
        table = reduce(lambda parent, name: parent.get(name, {}), parents, tree)
        numbered = table.get(last_name)
        if isinstance(numbered, dict):
            numbers = map(str, range(len(numbered)))
            table[last_name] = [numbered[number] for number in numbers if number in numbered]
    return tree


def put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set one value in nested tables; an empty table doesn't replace one that exists."""
    *parents, last_name = path
    for name in parents:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    if value != {} or not isinstance(tree.get(last_name), dict):
        tree[last_name] = value


def _is_file(word: str) -> bool:
    """Whether a word without @ is a job file, as most tools take one."""
    try:
        return not word.startswith("-") and (word.endswith(".toml") or Path(word).is_file())
    except (OSError, ValueError):  # No file can have such a name.
        return False


def _file(word: str, words: deque[str]) -> str:
    file = word[1:] or _next_value(words)
    if not file:
        raise ConfigError("CFG015", "@ names no job file", fix="give a TOML file after @")
    return file


def value_behind(word: str, words: deque[str]) -> str | None:
    """The value after ``=`` in a word, otherwise the next word; None if that is a flag or file, or missing."""
    _, equals_sign, text = word.partition("=")
    return text if equals_sign else _next_value(words)


def _switch(word: str) -> bool:
    name, equals_sign, text = word.partition("=")
    if equals_sign and text not in ("true", "false"):
        raise ConfigError("CFG002", f"{name} has the wrong type", shown(text), "true | false", "leave the value out")
    return text != "false"


def _next_value(words: deque[str]) -> str | None:
    if not words or words[0].startswith(("--", "@")):
        return None
    return words.popleft()


def _from_flag(name: str, text: str | None, document: Document | None) -> list[Setting]:
    written_path = tuple(name.removeprefix("--").split("."))
    key = _require_known(written_path, document)
    flag = _location(written_path, document)
    if key is None and len(written_path) == 1 and text is not None and not text.startswith(("{", "[")):
        _refuse_habit(written_path, text, document)
    if text is None:
        if key is None:
            raise ConfigError("CFG015", f"{flag} needs a value", allowed="a table", fix="see --help")
        if bool not in key.types:
            raise ConfigError("CFG015", f"{flag} needs a value", allowed=key.kind, fix="see --help")
        text = "true"
    value = from_text(key, text, flag)
    for part in reversed(written_path):
        value = {part: value}
    check(value, flag)
    return list(_walk(value, (), document))


def _refuse_habit(written_path: KeyPath, text: str, document: Document | None) -> None:
    """Refuse a value for a table whose name other tools have for one key, such as ``--model gpt2``."""
    fix = habit(written_path[0])
    if fix is not None:
        location = Setting(written_path, text, written_path, document).key_location
        got = shown(_literal(text, location))
        allowed = "a list of tables" if written_path in arrays() else "a table"
        raise ConfigError("CFG002", f"{location} has the wrong type", got, allowed, fix)


def from_text(key: Key | None, text: str, location: str) -> Any:
    """The value that a flag's text denotes."""
    if key and key.text:
        return text
    if key and key.many and not text.startswith("[") and text != "none":
        parts = map(str.strip, text.split(","))
        return [_element(key, part, location) for part in parts if part]
    return _literal(text, location)


def _element(key: Key, text: str, location: str) -> Any:
    """The value of an element of a list; in a list of texts, what looks like a number is a text, too."""
    value = _literal(text, location)
    if key.kind == "list of text" and not isinstance(value, str):
        return text
    return value


def _literal(text: str, location: str) -> Any:
    """The TOML value that a text denotes, or the text itself."""
    try:
        table = parse_unchecked(f"value = {text}", location)
    except ConfigError as error:
        if error.code == "CFG005":
            return text
        raise
    check(table, location)
    return table["value"] if len(table) == 1 else text


def _walk(value: Any, written_path: KeyPath, document: Document | None) -> Iterator[Setting]:
    key = _require_known(written_path, document)
    path = canonical(written_path)
    if schema_path(path) in arrays():
        yield from _walk_array(value, written_path, document)
    elif path in IGNORED:
        yield Setting(path, value, written_path, document)
    elif key is None or (free_table(path) and isinstance(value, dict)):
        if not isinstance(value, dict):
            problem = f"{Setting(path, value, written_path, document).key_location} has the wrong type"
            raise ConfigError("CFG002", problem, shown(value), "a table", "give it as a table")
        if key is not None:
            yield Setting(path, {}, written_path, document)
        for name, child in value.items():
            yield from _walk(child, (*written_path, name), document)
    elif key.secret and (document is None or document.is_option):
        location = Setting(path, value, written_path, document).key_location
        problem = f"{location}: others can read a secret on the command line"
        raise ConfigError("CFG102", problem, fix="set HF_TOKEN, or write it into a job file of mode 0600")
    else:
        is_absent = value == "none" and key.can_be_none and path == key.path
        yield Setting(path, None if is_absent else value, written_path, document)


def _walk_array(value: Any, written_path: KeyPath, document: Document | None) -> Iterator[Setting]:
    """An array takes the place of an earlier one, as any value does; a table with numbers for names changes those."""
    path = canonical(written_path)
    if isinstance(value, list):
        yield Setting(path, [], written_path, document)
        value = {str(number): table for number, table in enumerate(value)}
    if not isinstance(value, dict) or not all(map(is_number, value)):
        problem = f"{Setting(path, value, written_path, document).key_location} has the wrong type"
        fix = f"begin each of them with [[{dotted(written_path)}]]"
        raise ConfigError("CFG002", problem, shown(value), "a list of tables", fix)
    for number, table in value.items():
        if isinstance(table, dict):
            yield Setting((*path, number), {}, (*written_path, number), document)
        yield from _walk(table, (*written_path, number), document)


def _require_known(written_path: KeyPath, document: Document | None) -> Key | None:
    """The known key of that path; None for a table. A key inside a free table counts as that table."""
    path = canonical(written_path)
    key = key_at(free_table(path) or path)
    keyless_paths = tables().keys() | arrays() | IGNORED.keys()
    if key is None and schema_path(path) not in keyless_paths and written_path not in CONTAINERS:
        raise _unknown(written_path, document)
    return key


def _unknown(written_path: KeyPath, document: Document | None) -> ConfigError:
    location = _location(written_path, document)
    problem = f"unknown flag {location}"
    if document is not None:
        problem = f"{location}: unknown key {dotted(written_path)}"
    path = canonical(written_path)
    fix = _fix_of_other_tools(path)
    if fix is None and document is None:
        fix = _fix_of_switch(written_path)
    if fix is not None:
        return ConfigError("CFG001", problem, fix=fix)
    likely_key = nearest(path)
    if likely_key:
        return ConfigError("CFG001", problem, fix=f"did you mean `{likely_key}`?")
    table = schema_path(path[:-1])
    siblings = []
    for candidate in (*tables(), *keys()):
        if candidate and candidate[:-1] == table and candidate[-1] != EACH:
            siblings.append(candidate[-1])
    return ConfigError("CFG001", problem, allowed=", ".join(sorted(siblings)), fix="see --help")


def _fix_of_other_tools(path: KeyPath) -> str | None:
    """Remedy for a name that other tools have; None for others."""
    if len(path) == 1:
        return habit(path[0])
    if path[:1] not in tables() and path[:1] not in arrays():
        return habit_in_table(path)
    key = habit_inside(path)
    if key is not None:
        return f"did you mean `{key}`?"
    return habit("_".join(path[-2:])) or (None if similar_sibling(path) else habit(path[-1]))


def _fix_of_switch(written_path: KeyPath) -> str | None:
    """Remedy for a flag that is nearly a switch; None for others."""
    matches = get_close_matches(dotted(written_path), SWITCHES, n=1)
    return f"did you mean --{matches[0]}?" if matches else None


def _location(written_path: KeyPath, document: Document | None) -> str:
    return document.location(written_path) if document else f"--{dotted(written_path)}"


def relative_path(setting: Setting, keys: Collection[KeyPath]) -> str | None:
    """Relative path that a setting of one of these keys has; None for another key, and for another value."""
    value = setting.value
    if schema_path(setting.path) not in keys or not isinstance(value, str) or "://" in value:
        return None
    if value.startswith(("/", "~")):
        return None
    return value
