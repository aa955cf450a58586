"""Settings that a run is imagined with, and limits of time and money, as a command line gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hypha_ray.config.keys import shown
from hypha_ray.config.value_types import seconds_of
from hypha_ray.errors import ConfigError

SCENARIO_TABLES: Final = ("machines", "sites", "head")
"""Tables of a scenario that a trial may set; no table of a job file has these names."""
_NEXT_KEY: Final = re.compile(r",(?=\s*[A-Za-z_][\w.-]*\s*=)")
"""Comma before the next KEY=VALUE; other commas belong to a list."""


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
