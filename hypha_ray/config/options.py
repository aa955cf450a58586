"""Command lines of jobs with options of their own: the grammar and the errors of the training jobs.

    [--key VALUE | --key=VALUE …] [--switch] [--help]

A job's options are a dataclass. Flags and help come from its fields' types, defaults and docstrings. The field `from_`
is the flag ``--from``, since Python keeps the word to itself. Texts of a field with `REPEATED` as its metadata are
those of all its flags, and keep their commas.

Every key of the job file as text: for ``--help``, and for docs/configuration.md.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from errno import EACCES
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from hypha_ray.config.aliases import OF_PREPARE
from hypha_ray.config.assignments import from_text, value_behind
from hypha_ray.config.entry_point import STDOUT, keep_stdout_for_result
from hypha_ray.config.keys import EACH, Key, KeyPath, choice_remedy, key_of, keys, shown, tables
from hypha_ray.config.rl import LOWEST_TEMPERATURE
from hypha_ray.errors import ConfigError
from hypha_ray.files import as_installed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_ARGUMENTS = """\
arguments:
  [@] FILE.toml           a job file; later files override earlier ones
  --section.key VALUE     one key of the job file; overrides all files
  --dry-run               print a summary and the resolved job file, check them against the cluster, and exit
  --resume                continue the run named run.name, even if the job has changed
  --resume NAME|DIR|URL   continue that run with its own job file; files and keys given here override it
  --help                  this text

Keys, with their defaults:
"""
_BEGIN = "<!-- keys: made by hypha_ray.config.options -->"
_END = "<!-- end of keys -->"
T = TypeVar("T", bound="DataclassInstance")

REPEATED: Final = {"repeated": True}
"""Metadata of a field, a list of texts, whose flag may be given several times."""
RESULTS: Final = ("json", "out")
"""Options with the file of a result; ``-`` is standard output."""
_BETWEEN: Final = "\0"
"""Separator of the texts of a repeated flag; no argument of a process has it."""

_OTHER_NAMES = OF_PREPARE | {
    "source": "dataset dataset_name dataset_path data data_path input input_file train_file",
    "out": "output output_dir out_dir output_path save_dir",
    "tokenizer": "tokenizer_name tokenizer_name_or_path",
    "chat": "apply_chat_template",
    "model": "model_name_or_path model_name model_path checkpoint pretrained",
    "max_new_tokens": "max_tokens max_length max_completion_length",
    "max_response_tokens": "max_tokens max_new_tokens max_completion_length",
}
"""Names that other tools have for options, with ``_`` for ``-``."""
_RUNS = ("model", "from_")
"""Options that take a run, for which ``--run`` is another flag."""


def help_text(doc: str) -> str:
    """Text of ``--help``: a job script's docstring, its arguments, and one line for each key."""
    parts = [as_installed(doc).strip(), "", _ARGUMENTS.rstrip()]
    for path, table in tables().items():
        lines = list(map(_line, _keys_of(path)))
        if lines:
            parts += ["", f"{_header(path)}  {_summary(table)}", *lines]
    return "\n".join(parts)


def keys_markdown() -> str:
    """All keys as markdown: a heading and a table for each table of the job file."""
    parts = []
    for path, table in tables().items():
        rows = list(map(_row, _keys_of(path)))
        if rows:
            heading = f"### `{_header(path)}`"
            head = ["| key | kind | default | meaning |", "|---|---|---|---|"]
            parts.append("\n".join([heading, "", _summary(table), "", *head, *rows]))
    return "\n\n".join(parts)


def renewed(document: str) -> str:
    """A markdown document with its list of keys regenerated between the two comments that mark it."""
    block = f"{_BEGIN}\n\n{keys_markdown()}\n\n{_END}"
    pattern = f"{re.escape(_BEGIN)}.*{re.escape(_END)}"
    return re.sub(pattern, lambda _: block, document, flags=re.DOTALL)


def _keys_of(table: KeyPath) -> list[Key]:
    return [key for key in keys().values() if key.path[:-1] == table]


def _header(path: KeyPath) -> str:
    """Line of a job file with which a table begins."""
    if path[-1:] == (EACH,):
        name = ".".join(path[:-1])
        return f"[[{name}]]"
    name = ".".join(path)
    return f"[{name}]"


def _line(key: Key) -> str:
    flag = f"--{key.name} {key.default_text}"
    return f"  {flag:<58} {key.meaning} ({key.kind})"


def _row(key: Key) -> str:
    default = f"`{key.default_text}`" if key.default_text else ""
    cells = (f"`{key.path[-1]}`", key.kind, default, key.meaning)
    escaped = [cell.replace(" | ", ", ") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _summary(table: type) -> str:
    doc = table.__doc__ or ""
    return doc.splitlines()[0]


def parse_options(options_class: type[T], doc: str | None, arguments: Sequence[str], position: str | None = None) -> T:
    """Parse a job's command line into its options; ``-h`` or ``--help`` prints all options and exits with 0.

    Args:
        options_class: the dataclass.
        doc: the job script's own description.
        arguments: the command line, without the script.
        position: name of the option whose value may stand without its flag, or values if the flag may be repeated;
            None: there is none.

    Raises:
        ConfigError: CFG001 unknown flag, CFG002 wrong type, CFG003 none of the allowed values, CFG012 missing flag,
            CFG015 stray argument or missing value.
        SystemExit: after the help.

    """
    keys = _keys(options_class)
    if {"-h", "--help"} & set(arguments):
        print(_help(doc or "", keys))
        raise SystemExit(0)
    types = get_type_hints(options_class)
    repeated_names = {field.name for field in fields(options_class) if field.metadata == REPEATED}
    values: dict[str, Any] = {}
    for name, text in _texts(arguments, keys, position, repeated_names).items():
        values[name] = text.split(_BETWEEN) if name in repeated_names else _value(keys[name], text, types[name])
    for name, key in keys.items():
        if key.default is MISSING and name not in values:
            problem = f"{flag_of(name)} is missing"
            raise ConfigError("CFG012", problem, allowed=key.kind, fix=f"give {key.meaning}")
    to_stdout = [flag_of(name) for name in RESULTS if values.get(name) == STDOUT]
    if len(to_stdout) > 1:
        problem = f"{' and '.join(to_stdout)} exclude each other as standard output"
        raise ConfigError("CFG011", problem, fix="name a file for one of them")
    if to_stdout:
        keep_stdout_for_result()
    return options_class(**values)


def refuse_strays(options: DataclassInstance, owners: Mapping[str, Sequence[str]]) -> None:
    """Refuse options that would change nothing.

    Args:
        options: a command line's.
        owners: the options of which one has to be given beside that of the key.

    Raises:
        ConfigError: CFG011, none of them is given.

    """
    used_names = {name for name, value in vars(options).items() if value is not None and value is not False}
    for name, owner_names in owners.items():
        if name in used_names and used_names.isdisjoint(owner_names):
            flags = " or ".join(map(flag_of, owner_names))
            raise ConfigError("CFG011", f"{flag_of(name)} is for {flags} alone", fix=f"leave it out, or give {flags}")


def require_round(round: int | None) -> None:
    """Refuse a number that no round has; people count rounds from one.

    Raises:
        ConfigError: CFG003, it is less than 1.

    """
    if round is not None and round < 1:
        raise ConfigError("CFG003", "--round is out of range", str(round), "1 or more", "count the rounds from 1")


class Sampling(TypedDict, total=False):
    """Settings by which tokens are chosen; one that is None or isn't there is that of the saved model."""

    temperature: float | None
    """Divisor of logits; 0: the most probable token each time."""
    top_p: float | None
    """Probability mass of the tokens to choose from."""
    top_k: int | None
    """Number of most probable tokens to choose from."""


def require_sampling(max_new_tokens: int, seed: int, sampling: Sampling) -> None:
    """Refuse settings of generation that are out of range.

    Raises:
        ConfigError: CFG003, a value is out of range.

    """
    lowest = LOWEST_TEMPERATURE
    temperature = sampling.get("temperature")
    top_p = sampling.get("top_p")
    top_k = sampling.get("top_k")
    draws = temperature is not None and lowest <= temperature < float("inf")
    limits: tuple[tuple[str, float | None, bool, str], ...] = (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "1 or more"),
        ("temperature", temperature, draws or not temperature, f"0, or {lowest:g} or more"),
        ("top_p", top_p, top_p is not None and 0 < top_p <= 1, "above 0, up to 1"),
        ("top_k", top_k, top_k is not None and top_k >= 1, "1 or more"),
        ("seed", seed, seed >= 0, "0 or more"),
    )
    for name, value, is_good, allowed in limits:
        if value is not None and not is_good:
            fix = "write such a number, or leave it out"
            raise ConfigError("CFG003", f"{flag_of(name)} is out of range", str(value), allowed, fix)


def _texts(
    arguments: Sequence[str], keys: Mapping[str, Key], position: str | None, repeated_names: Collection[str]
) -> dict[str, str]:
    """Texts of the values on a command line, by the option's name; a flag given twice has its last value.

    A repeated flag has all its values.
    """
    texts: dict[str, str] = {}
    words = deque(arguments)
    while words:
        word = words.popleft()
        flag, equals_sign, _ = word.partition("=")
        is_position = position in repeated_names or position not in texts
        if position is not None and not word.startswith("-") and is_position:
            _add_values(texts, position, [word], repeated_names)
            continue
        if not flag.startswith("--"):
            raise _stray(flag, texts, keys, position)
        name = _name(flag)
        if f"{name}_" in keys:
            name = f"{name}_"
        if name == "run" and name not in keys:
            name = next((option for option in _RUNS if option in keys), name)
        if name not in keys:
            raise _unknown(flag, keys)
        key = keys[name]
        value = value_behind(word, words)
        if value is None:
            if bool not in key.types:
                raise ConfigError("CFG015", f"{flag_of(name)} needs a value", allowed=key.kind, fix="see --help")
            texts[name] = "true"
            continue
        values = [value]
        while key.many and not equals_sign and (value := value_behind("", words)) is not None:
            values.append(value)
        _add_values(texts, name, values, repeated_names)
    return texts


def _stray(word: str, texts: Mapping[str, str], keys: Mapping[str, Key], position: str | None) -> ConfigError:
    """Error for a word that is no flag, and no value of the option that may stand without one."""
    fix = "a value stands behind its flag; see --help"
    if word.startswith("-"):
        fix = "-- before an option; see --help"
    elif "source" in texts:
        fix = "one --source; quotes around a pattern keep the shell from filling it in: 'FOLDER/*.txt'"
    elif "source" in keys:
        fix = f"did you mean --source {shown(word)}?"
    elif position is not None:
        fix = f"give one value for {flag_of(position)}; see --help"
    return ConfigError("CFG015", f"unexpected argument {shown(word)}", fix=fix)


def _add_values(texts: dict[str, str], name: str, values: Sequence[str], repeated_names: Collection[str]) -> None:
    """Add the values of an option, to those of its earlier flags if it may be repeated, otherwise instead of them."""
    if name not in repeated_names:
        texts[name] = ",".join(values)
        return
    earlier = [texts[name]] if name in texts else []
    texts[name] = _BETWEEN.join([*earlier, *values])


def _value(key: Key, text: str, annotation: Any) -> Any:
    flag = flag_of(key.name)
    value = from_text(key, text, flag)
    if value == "none" and key.can_be_none and not key.text:
        return None
    if Path in key.types:
        if not text:
            raise ConfigError("CFG003", f"{flag} is out of range", "nothing", key.kind, "name one")
        return Path(text)
    try:
        return TypeAdapter(annotation, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        fix = choice_remedy(value, key.kind)
        if key.default is not MISSING:
            fix = f"{fix}, or leave it out"
            if key.default_text:
                fix = f"{fix} for {key.default_text}"
        first_error = error.errors()[0]
        if first_error["type"] == "literal_error":
            raise ConfigError("CFG003", f"{flag} is out of range", shown(value), key.kind, fix) from None
        raise ConfigError("CFG002", f"{flag} has the wrong type", shown(value), key.kind, fix) from None


def _unknown(flag: str, keys: Mapping[str, Key]) -> ConfigError:
    is_short = flag.isprintable() and len(flag) < 80
    problem = f"unknown flag {flag if is_short else shown(flag)}"
    for option, names in _OTHER_NAMES.items():
        if option in keys and _name(flag).lower() in names.split():
            return ConfigError("CFG001", problem, fix=f"did you mean {flag_of(option)}?")
    matches = get_close_matches(_name(flag)[:80], [*keys, "help"], n=1)
    if matches:
        return ConfigError("CFG001", problem, fix=f"did you mean {flag_of(matches[0])}?")
    return ConfigError("CFG001", problem, allowed=", ".join(map(flag_of, keys)), fix="see --help")


def _keys(options_class: type[DataclassInstance]) -> dict[str, Key]:
    types = get_type_hints(options_class, include_extras=True)
    meanings = _meanings(options_class)
    return {field.name: _key(field, types[field.name], meanings[field.name]) for field in fields(options_class)}


def _key(field: Field[Any], annotation: Any, meaning: str) -> Key:
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return key_of((field.name,), FieldInfo(annotation=annotation, default=default, description=meaning))


def _meanings(options_class: type) -> dict[str, str]:
    """The docstring of each field, which Python keeps only in the source."""
    source = textwrap.dedent(inspect.getsource(options_class))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    meanings = {}
    for statement, text in pairwise(definition.body):
        match statement, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                meanings[name] = " ".join(meaning.split())
    return meanings


def _help(doc: str, keys: Mapping[str, Key]) -> str:
    lines = [as_installed(doc).strip(), "", "options:"]
    for key in keys.values():
        flag = f"{flag_of(key.name)} {_default(key)}"
        lines.append(f"  {flag:<34} {key.meaning} ({key.kind})")
    lines.append(f"  {'-h, --help':<34} this text")
    return "\n".join(lines)


def _default(key: Key) -> str:
    if key.default is MISSING:
        return "(needed)"
    return "" if key.default is False or key.default == [] else key.default_text


def flag_of(name: str) -> str:
    """Flag of an option by its name in Python."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def make_plot_folder(option: str, folder: Path) -> None:
    """Make the folder for plots that an option names, before the results that they are drawn of are computed.

    Raises:
        ConfigError: CFG015, the folder can't be written.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise unwritable_plots(option, folder, error) from None


def unwritable_plots(option: str, folder: Path, error: OSError) -> ConfigError:
    """Error of a folder for plots that can't be written."""
    problem = f"the plots can't be written to {folder}"
    return ConfigError("CFG015", problem, error.strerror or str(error), fix=f"name a folder for {option}")
