"""Settings that a run is imagined with, and limits of time and money, as a command line gives them.

Settings of machines, links and head are keys of a scenario, such as ``machines.up_mbps=50``. A key without a number
is meant for all machines or sites; ``machines.0.up_mbps`` is for the first group.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from hypha_ray.config.keys import shown
from hypha_ray.config.value_types import Table, seconds_of
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.scenario import Scenario

SCENARIO_TABLES: Final = ("machines", "sites", "head")
"""Tables of a scenario that a trial may set; no table of a job file has these names."""
_NEXT_KEY: Final = re.compile(r",(?=\s*[A-Za-z_][\w.-]*\s*=)")
"""Comma before the next KEY=VALUE; other commas belong to a list."""
S = TypeVar("S", bound=Scenario)


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings in the place of a run's own, as texts by dotted key."""

    text: str
    """The settings as they were written."""
    job: tuple[tuple[str, str], ...] = ()
    """Keys of the job file."""
    scenario: tuple[tuple[str, str], ...] = ()
    """Keys of a scenario's machines, sites and head."""

    @property
    def flags(self) -> list[str]:
        """The settings of the job file as flags of a job's command line."""
        return [f"--{key}={value}" for key, value in self.job]


def parse_trial(text: str) -> Trial:
    """Parse ``KEY=VALUE[,KEY=VALUE…]``.

    Raises:
        ConfigError: CFG015 a part isn't KEY=VALUE, CFG005 a key is given twice.

    """
    settings: dict[str, str] = {}
    for part in _NEXT_KEY.split(text):
        key, equals_sign, value = part.partition("=")
        key = key.strip()
        if value.rstrip().endswith(","):
            equals_sign = ""  # Nothing stands behind the last comma.
        if not key or not equals_sign or not value.strip():
            example = "write a key of the job file, = and a value, such as sync.codec=int4"
            raise ConfigError("CFG015", "--try needs settings", shown(text), "KEY=VALUE[,KEY=VALUE…]", example)
        if key in settings:
            raise ConfigError("CFG005", f"--try has {shown(key)} twice", shown(text), fix="keep one of them")
        settings[key] = value.strip()
    job: list[tuple[str, str]] = []
    scenario: list[tuple[str, str]] = []
    for key, value in settings.items():
        table, _, _ = key.partition(".")
        (scenario if table in SCENARIO_TABLES else job).append((key, value))
    return Trial(text, tuple(job), tuple(scenario))


def parse_trials(texts: Sequence[str]) -> list[Trial]:
    """Parse the values of all ``--try`` of a command line, see `parse_trial`."""
    return [parse_trial(text) for text in texts]


def parse_duration_s(text: str) -> float:
    """Parse a time such as ``6h``, ``90min``, ``2d`` or ``45`` (seconds).

    Raises:
        ConfigError: CFG003, it isn't one, or it is 0.

    """
    seconds = seconds_of(text)
    if seconds is None:
        fix = "give a number and a unit, such as 6h"
        raise ConfigError("CFG003", "--deadline is out of range", shown(text), "a time in s, min, h or d", fix)
    return seconds


def with_scenario_keys(scenario: S, settings: Sequence[tuple[str, str]]) -> S:
    """Set keys of machines, sites or head.

    Args:
        scenario: the scenario.
        settings: dotted keys and texts of their values.

    Raises:
        ConfigError: CFG001 unknown key, CFG002 wrong type, CFG003 out of range or no such group.

    """
    for key, text in settings:
        table, *path = key.split(".")
        value = _parsed(text)
        current = getattr(scenario, table)
        if isinstance(current, Table):
            changed: Any = _with(current, key, path, value)
        else:
            chosen, rest = _chosen(len(current), key, path)
            entries = list(current)
            for index in chosen:
                entries[index] = _with(entries[index], key, rest, value)
            changed = tuple(entries)
        scenario = scenario.model_copy(update={table: changed})
    return scenario


def _parsed(text: str) -> Any:
    """A value of TOML; any other text is itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _chosen(count: int, key: str, path: Sequence[str]) -> tuple[range, Sequence[str]]:
    """Indices of the entries that a key is meant for, and the rest of its path."""
    if not path or not path[0].isdecimal():
        return range(count), path
    index = int(path[0])
    if index >= count:
        raise ConfigError("CFG003", f"there is no {key}", path[0], f"0 … {count - 1}", "count from 0")
    return range(index, index + 1), path[1:]


def _with(table: Table, key: str, path: Sequence[str], value: Any) -> Table:
    """A table with another value at a path.

    Raises:
        ConfigError: CFG001 unknown key, CFG002 wrong type, CFG003 out of range.

    """
    content = table.model_dump(exclude_none=True)
    parent = content
    kind = table
    for name in path[:-1]:
        _require_key(kind, key, name)
        kind = getattr(kind, name)
        if not isinstance(kind, Table):
            raise ConfigError("CFG001", f"unknown key {key}", fix=f"{name} has no keys of its own")
        parent = parent[name]
    if not path:
        raise ConfigError("CFG001", f"{key} is a table", allowed=_keys_of(kind), fix="name one of its keys")
    _require_key(kind, key, path[-1])
    if isinstance(getattr(kind, path[-1]), Table):
        raise ConfigError("CFG001", f"{key} is a table", allowed=_keys_of(getattr(kind, path[-1])), fix="name a key")
    parent[path[-1]] = value
    try:
        return type(table).model_validate(content)
    except ValidationError as error:
        raise _explained(error, key, value) from None


def _require_key(table: Table, key: str, name: str) -> None:
    names = type(table).model_fields
    if name in names:
        return
    matches = get_close_matches(name, names, n=1)
    if matches:
        raise ConfigError("CFG001", f"unknown key {key}", shown(name), fix=f"did you mean {matches[0]}?")
    raise ConfigError("CFG001", f"unknown key {key}", shown(name), _keys_of(table), "name one of these")


def _keys_of(table: Table) -> str:
    return ", ".join(type(table).model_fields)


def _explained(error: ValidationError, key: str, value: Any) -> ConfigError:
    first = error.errors(include_url=False)[0]
    if first["type"].endswith("_type"):
        return ConfigError("CFG002", f"{key} has the wrong type", shown(value), fix=first["msg"])
    return ConfigError("CFG003", f"{key} is out of range", shown(value), fix=first["msg"])
