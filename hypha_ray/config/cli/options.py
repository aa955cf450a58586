"""Command lines of jobs with options of their own: the grammar and the errors of the training jobs.

    [--key VALUE | --key=VALUE …] [--switch] [--help]

A job's options are a dataclass. Flags and help come from its fields' types, defaults and docstrings.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from hypha_ray.config.assignments import from_text, value_behind
from hypha_ray.config.keys import Key, key_of, mend, shown
from hypha_ray.errors import ConfigError
from hypha_ray.files import as_installed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def parse_options(kind: type[T], doc: str | None, arguments: Sequence[str], position: str | None = None) -> T:
    """Parse a job's command line into its options; ``-h`` or ``--help`` prints all options and exits with 0.

    Args:
        kind: the dataclass.
        doc: the job script's own description.
        arguments: the command line, without the script.
        position: name of the option whose value may stand without its flag; None: there is none.

    Raises:
        ConfigError: CFG001 unknown flag, CFG002 wrong type, CFG003 none of the allowed values, CFG012 missing flag,
            CFG015 stray argument or missing value.
        SystemExit: after the help.

    """
    known = _keys(kind)
    if {"-h", "--help"} & set(arguments):
        print(_help(doc or "", known))
        raise SystemExit(0)
    types = get_type_hints(kind)
    values = {}
    for key, text in _given(arguments, known, position).values():
        values[key.name] = _valid(key, text, types[key.name])
    for key in known.values():
        if key.default is MISSING and key.name not in values:
            raise ConfigError("CFG012", f"{_flag(key.name)} is missing", allowed=key.kind, fix=f"give {key.meaning}")
    return kind(**values)


def refuse_strays(options: DataclassInstance, owners: Mapping[str, Sequence[str]]) -> None:
    """Refuse options that would change nothing.

    Args:
        options: a command line's.
        owners: the options of which one has to be given beside that of the key.

    Raises:
        ConfigError: CFG011, none of them is given.

    """
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    for name, allowing in owners.items():
        if name in given and not given.intersection(allowing):
            theirs = " or ".join(map(_flag, allowing))
            raise ConfigError("CFG011", f"{_flag(name)} is for {theirs} alone", fix=f"leave it out, or give {theirs}")


def require_round(round: int | None) -> None:
    """Refuse a number that no round has; people count rounds from one.

    Raises:
        ConfigError: CFG003, it is less than 1.

    """
    if round is not None and round < 1:
        raise ConfigError("CFG003", "--round is out of range", str(round), "1 or more", "count the rounds from 1")


def _given(arguments: Sequence[str], known: Mapping[str, Key], position: str | None) -> dict[str, tuple[Key, str]]:
    """The flags of a command line and their values; a flag given twice has its last value."""
    found: dict[str, tuple[Key, str]] = {}
    rest = deque(arguments)
    while rest:
        word = rest.popleft()
        name = word.partition("=")[0]
        if position is not None and not word.startswith("-") and position not in found:
            found[position] = known[position], word
            continue
        if not name.startswith("--"):
            raise ConfigError("CFG015", f"unexpected argument {shown(name)}", fix="-- before an option; see --help")
        key = known.get(name.removeprefix("--").replace("-", "_"))
        if key is None:
            raise _unknown(name, known)
        text = value_behind(word, rest)
        words = [] if text is None else [text]
        while key.many and "=" not in word and (more := value_behind("", rest)) is not None:
            words.append(more)
        if not words and bool not in key.types:
            raise ConfigError("CFG015", f"{_flag(key.name)} needs a value", allowed=key.kind, fix="see --help")
        found[key.name] = key, ",".join(words) or ("" if words else "true")
    return found


def _valid(key: Key, text: str, annotation: Any) -> Any:
    value = from_text(key, text, _flag(key.name))
    if value == "none" and key.can_be_none:
        return None
    if Path in key.types:
        if not text:
            raise ConfigError("CFG003", f"{_flag(key.name)} is out of range", "nothing", key.kind, "name one")
        return Path(text)
    try:
        return TypeAdapter(annotation, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        choice = error.errors()[0]["type"] == "literal_error"
        code, what = ("CFG003", "is out of range") if choice else ("CFG002", "has the wrong type")
        otherwise = "" if key.default is MISSING else ", or leave it out"
        fix = f"{mend(value, key.kind)}{otherwise}{key.default_text and f' for {key.default_text}'}"
        raise ConfigError(code, f"{_flag(key.name)} {what}", shown(value), key.kind, fix) from None


def _unknown(name: str, known: Mapping[str, Key]) -> ConfigError:
    near = get_close_matches(name.removeprefix("--").replace("-", "_")[:80], [*known, "help"], n=1)
    what = f"unknown flag {name if name.isprintable() and len(name) < 80 else shown(name)}"
    if near:
        return ConfigError("CFG001", what, fix=f"did you mean {_flag(near[0])}?")
    return ConfigError("CFG001", what, allowed=", ".join(map(_flag, known)), fix="see --help")


def _keys(kind: type[DataclassInstance]) -> dict[str, Key]:
    types = get_type_hints(kind, include_extras=True)
    meanings = _meanings(kind)
    return {field.name: _key(field, types[field.name], meanings[field.name]) for field in fields(kind)}


def _key(field: Field[Any], annotation: Any, meaning: str) -> Key:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return key_of((field.name,), FieldInfo(annotation=annotation, default=default, description=meaning))


def _meanings(kind: type) -> dict[str, str]:
    """The docstring of each field, which Python keeps only in the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, text in zip(body.body, body.body[1:], strict=False):
        match statement, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[name] = " ".join(meaning.split())
    return found


def _help(doc: str, known: Mapping[str, Key]) -> str:
    lines = [as_installed(doc).strip(), "", "options:"]
    for key in known.values():
        lines.append(f"  {f'{_flag(key.name)} {_default(key)}':<34} {key.meaning} ({key.kind})")
    return "\n".join([*lines, f"  {'-h, --help':<34} this text"])


def _default(key: Key) -> str:
    if key.default is MISSING:
        return "(needed)"
    return "" if key.default is False or key.default == [] else key.default_text


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
