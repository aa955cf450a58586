"""Members that a job names and that a user brings, by the keys that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from hypha_ray.config.keys import values
from hypha_ray.config.schema import Job
from hypha_ray.errors import ConfigError
from hypha_ray.families import FAMILIES
from hypha_ray.plugins import is_built_in, is_own, sources, unknown_option
from hypha_ray.python_sources import files_hash


@dataclass(frozen=True, slots=True)
class PluginUse:
    """Use of a member of a family."""

    family: str
    key: str
    """Key of the job file that names the member."""
    name: str
    options: Mapping[str, Any] | None
    """The member's own options; None if the job has none."""


def plugin_uses(job: Job) -> Iterator[PluginUse]:
    """Uses of members that aren't built in; none under ``[rl]`` in a job that isn't one of RL."""
    for use in _all_uses(job):
        if is_own(use.family, use.name) and (job.rl.algorithm is not None or not use.key.startswith("rl.")):
            yield use


def source_hashes(job: Job) -> dict[str, str]:
    """Hash of the source of each member that isn't built in, by the key and the name; without a file it has none."""
    files = {f"{use.key} {use.name}": sources(use.family, use.name) for use in plugin_uses(job)}
    return {key: files_hash(paths) for key, paths in files.items() if paths}


def check_options(job: Job) -> None:
    """Refuse options of built-in members, which have none, and of members that the job doesn't name.

    Raises:
        ConfigError: CFG001.

    """
    for use in _all_uses(job):
        if use.options and is_built_in(use.family, use.name):
            what = f"{use.key}_options: {FAMILIES[use.family].noun} {use.name} has no options"
            raise ConfigError("CFG001", what, ", ".join(use.options), fix="leave the table out")
    for key, value in values(job):
        if key.family is not None and value is None and (options := _options_of(job, key.name)):
            what = f"{key.name}_options: the job names no {FAMILIES[key.family].noun} of its own"
            raise ConfigError("CFG001", what, ", ".join(options), fix=f"leave the table out, or set {key.name}")
    for name in job.telemetry.sinks_options or {}:
        if name not in job.telemetry.sinks:
            raise unknown_option("telemetry.sinks_options: no such sink in telemetry.sinks", name, job.telemetry.sinks)


def _all_uses(job: Job) -> Iterator[PluginUse]:
    """Uses of all members; keys with a list have a table of options for each name."""
    for key, value in values(job):
        if key.family is None or value is None:
            continue
        options = _options_of(job, key.name)
        if isinstance(value, str):
            yield PluginUse(key.family, key.name, value, options)
        else:
            yield from (PluginUse(key.family, key.name, name, (options or {}).get(name)) for name in value)


def _options_of(job: Job, key: str) -> Mapping[str, Any] | None:
    *tables, name = key.split(".")
    table = reduce(_inner, tables, job)
    options: Mapping[str, Any] | None = getattr(table, f"{name}_options", None)
    return options


def _inner(table: Any, part: str) -> Any:
    return table[int(part)] if isinstance(table, list) else getattr(table, part)
