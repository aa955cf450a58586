"""Tables and keys of a job file, read from the schema, with kind, default and meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from hypha_ray.config.schema import Job
from hypha_ray.config.value_types import Table
from hypha_ray.plugins import Plugin
from hypha_ray.texts import redacted

KeyPath: TypeAlias = tuple[str, ...]

EACH: Final = "*"
"""Part of a path in the schema that stands for the number of a table in an array of tables."""

CONFIG: KeyPath = ("model", "config")
"""The table whose keys are defined by transformers."""

LABELS: Final = frozenset({"num_labels", "id2label", "label2id", "problem_type"})
"""Keys of a model's configuration that define its classes; they mean the same as keys of ``[model]``."""
TOKENS: Final = frozenset(
    f"{token}_token_id" for token in ("bos", "eos", "pad", "sep", "cls", "mask", "unk", "decoder_start")
)
"""Keys of a model's configuration that name special tokens."""
BESIDE_REPOSITORY: Final = LABELS | TOKENS | {"dtype"}
"""Keys of a model's configuration that a job may set for a repository."""

_KINDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true | false",
    SecretStr: "secret",
    Path: "path",
    dict: "table",
}
_TEXTS: Final = frozenset({str, Literal, SecretStr, Path})
"""Types whose values are the texts of flags."""
_LITERALS: Final = frozenset({bool, int, float})
"""Types whose values a flag's text denotes, also if the key has a word such as ``auto`` besides."""
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_LONGEST = 80
_OPERATORS = {
    **dict.fromkeys(("gt", "above", "over", "more", "greater"), ">"),
    **dict.fromkeys(("=>", "ge", "gte", "≥"), ">="),
    **dict.fromkeys(("lt", "below", "under", "less"), "<"),
    **dict.fromkeys(("=<", "le", "lte", "≤"), "<="),
}
"""Other ways to write a comparison."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the job file; `types` are its allowed types, `kind` is their description."""

    path: KeyPath
    types: tuple[Any, ...]
    kind: str
    default: Any
    meaning: str
    family: str | None = None
    """Family whose members the value names; None if it names none."""

    @property
    def name(self) -> str:
        """The dotted name; N is the number of a table in an array."""
        return ".".join(self.path).replace(EACH, "N")

    @property
    def default_text(self) -> str:
        """The default as a job file would have it; empty for an absent value."""
        if self.default is None:
            return ""
        return json.dumps(self.default, ensure_ascii=False)

    @property
    def required(self) -> bool:
        """Whether its table can't do without the key."""
        table = tables().get(schema_path(self.path)[:-1])
        return table is not None and self.path[-1] in table.required

    @property
    def secret(self) -> bool:
        """Whether the value is secret and never shown."""
        return SecretStr in self.types

    @property
    def text(self) -> bool:
        """Whether a flag's value is taken literally."""
        return _LITERALS.isdisjoint(self.types) and not _TEXTS.isdisjoint(self.types)

    @property
    def many(self) -> bool:
        """Whether the value is a list."""
        return list in self.types or tuple in self.types

    @property
    def can_be_none(self) -> bool:
        """Whether the value `none` turns it off, and isn't a word of its own, as in ``rl.reward.deadline_s``.

        Something may well be named none.
        """
        if NoneType not in self.types or self.path[-1:] == ("name",):
            return False
        own_words = self.kind if self.default is None else self.kind.removesuffix(" | none")
        return "none" not in own_words.split(" | ")


@cache
def tables() -> dict[KeyPath, type[Table]]:
    """Every table in the order of the schema; the job itself is ``()``, the tables of an array are under `EACH`."""
    return dict(_tables((), Job))


@cache
def arrays() -> frozenset[KeyPath]:
    """Every array of tables."""
    return frozenset(path[:-1] for path in tables() if path[-1:] == (EACH,))


@cache
def keys() -> dict[KeyPath, Key]:
    """Every key, in the order of the schema."""
    all_keys: dict[KeyPath, Key] = {}
    for table_path, table in tables().items():
        for name, field in table.model_fields.items():
            path = (*table_path, name)
            if path not in tables() and path not in arrays():
                all_keys[path] = key_of(path, field)
    return all_keys


def schema_path(path: Sequence[str]) -> KeyPath:
    """A path of a job file with `EACH` for the numbers of tables in arrays."""
    in_schema: KeyPath = ()
    for part in path:
        is_index = in_schema in arrays() and is_number(part)
        in_schema = (*in_schema, EACH if is_index else part)
    return in_schema


@cache
def free_tables() -> frozenset[KeyPath]:
    """Tables whose keys are defined elsewhere: by transformers, and by members of families that users bring."""
    return frozenset(path for path, key in keys().items() if dict in key.types)


def free_table(path: Sequence[str]) -> KeyPath | None:
    """The free table that a path is or leads into; None if there is none."""
    for length in range(1, len(path) + 1):
        table = tuple(path[:length])
        if table in free_tables():
            return table
    return None


def is_number(part: str) -> bool:
    """Whether a part of a path can be the number of a table in an array."""
    return re.fullmatch(r"0|[1-9]\d{0,3}", part, re.ASCII) is not None


def key_at(path: Sequence[str]) -> Key | None:
    """The key at a path of a job file; None if there is none."""
    key = keys().get(schema_path(path))
    return key and replace(key, path=tuple(path))


def values(table: Table, path: KeyPath = ()) -> Iterator[tuple[Key, Any]]:
    """Every key of a job, or of a table at `path`, with its value; of arrays the keys of each of their tables."""
    for name in type(table).model_fields:
        value = getattr(table, name)
        value_path = (*path, name)
        if isinstance(value, Table):
            yield from values(value, value_path)
        elif schema_path(value_path) in arrays():
            for number, inner in enumerate(value):
                yield from values(inner, (*value_path, str(number)))
        elif key := key_at(value_path):
            yield key, value


def similar_sibling(path: Sequence[str]) -> str | None:
    """The known key or table of a similar name in the same table; None without one."""
    table = tuple(path[:-1])
    siblings = [known_path[-1] for known_path in _nameable_paths() if known_path[:-1] == schema_path(table)]
    for match in get_close_matches(path[-1][:_LONGEST], siblings, n=1):
        return ".".join([*table, match])
    return None


def nearest(path: Sequence[str]) -> str | None:
    """The known key that was probably meant: a similar one in that table, in any table, or one of the same name."""
    sibling = similar_sibling(path)
    if sibling is not None:
        return sibling
    by_full_name: dict[str, KeyPath] = {}
    by_name: dict[str, KeyPath] = {}
    for candidate in _nameable_paths():
        by_name.setdefault(candidate[-1], candidate)
        if schema_path(path[:-1]) not in tables():
            by_full_name[".".join(candidate)] = candidate
    full_name = ".".join(path)[:_LONGEST]
    for name, candidates in ((full_name, by_full_name), (path[-1][:_LONGEST], by_name)):
        for match in get_close_matches(name, candidates, n=1):
            return ".".join(candidates[match]).replace(EACH, "N")
    return None


def _nameable_paths() -> Iterator[KeyPath]:
    """Paths of all tables, arrays and keys that have a name, and of the labels of a model."""
    labels = [(*CONFIG[:1], name) for name in sorted(LABELS)]
    for path in (*tables(), *arrays(), *keys(), *labels):
        if path and path[-1] != EACH:
            yield path


def dotted(path: Sequence[str]) -> str:
    """A key as text for a message: one short line."""
    parts = []
    for part in path:
        is_bare = re.fullmatch(r"[\w-]+", part)
        parts.append(part if is_bare else repr(part))
    return _shortened(".".join(parts))


def shown(value: object) -> str:
    """A value as text for a message: one short line, without anything that looks like a token."""
    if isinstance(value, dict):
        return "a table"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    text = re.sub(r"hf_\w+", "hf_***", redacted(text))
    text = re.sub(r"^(['\"][^\s/:@]*):\S+@", r"\1:***@", text)  # An address with a password, but without a scheme.
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _tables(path: KeyPath, table: type[Table]) -> Iterator[tuple[KeyPath, type[Table]]]:
    yield path, table
    for name, field in table.model_fields.items():
        item_type = field.annotation
        inner_path = (*path, name)
        if get_origin(item_type) is list:
            (item_type,) = get_args(item_type)
            inner_path = (*inner_path, EACH)
        if isinstance(item_type, type) and issubclass(item_type, Table):
            yield from _tables(inner_path, item_type)


def key_of(path: KeyPath, field: FieldInfo) -> Key:
    """The key of a field, which is one of a table or of a job's options."""
    kind = _kind(field.annotation, field.metadata)
    types = tuple(_types(field.annotation))
    if NoneType in types and field.default is not None:
        kind += " | none"
    return Key(path, types, kind, field.default, field.description or "", _family(field.annotation, field.metadata))


def _family(annotation: Any, metadata: Sequence[Any] = ()) -> str | None:
    """The family of the plug-ins in an annotation."""
    for mark in metadata:
        if isinstance(mark, Plugin):
            return mark.family
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _family(arguments[0], arguments[1:])
    for argument in arguments:
        family = _family(argument)
        if family is not None:
            return family
    return None


def _types(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin in (Union, UnionType):
        for argument in arguments:
            yield from _types(argument)
    elif origin is Annotated:
        yield from _types(arguments[0])
    else:
        yield origin or annotation


def _kind(annotation: Any, limits: Sequence[Any] = ()) -> str:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        inner_limits = list(limits)
        for mark in arguments[1:]:
            inner_limits += getattr(mark, "metadata", [mark])
        return _kind(arguments[0], inner_limits)
    if origin in (Union, UnionType):
        present = [argument for argument in arguments if argument is not NoneType]
        return " | ".join(_kind(argument, limits) for argument in present)
    if origin is Literal:
        return " | ".join(arguments)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_kind, arguments))}]"
    members = [mark.kind for mark in limits if isinstance(mark, Plugin)]
    (type_name,) = members or [_KINDS[origin or annotation]]
    bounds = []
    for limit in limits:
        for name, symbol in _BOUNDS.items():
            if hasattr(limit, name):
                bounds.append(f"{symbol} {getattr(limit, name)}")
    return f"{type_name} {' and '.join(bounds)}".rstrip()


def choice_remedy(value: object, kind: str) -> str:
    """Remedy for a value that isn't of a key's kind: the nearest of its choices, otherwise the kind in words."""
    choices = [choice for choice in kind.split(" | ") if choice != "module:object"]
    if isinstance(value, str) and len(choices) > 1:
        operator = _OPERATORS.get(value.lower())
        matches = [operator] if operator in choices else get_close_matches(value, choices, n=1)
        if matches:
            return f"write {matches[0]}"
    if " | " in kind:
        return "write one of these"
    if kind.startswith("["):
        return f"write {kind}"
    article = "an" if kind[:1] in "aeiou" else "a"
    return f"write {article} {kind}"
