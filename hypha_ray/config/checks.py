"""Checks of a job: values in range, values that agree, all that a run needs, options of its plug-ins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pydantic import ValidationError

from hypha_ray.config.assignments import Setting, merged
from hypha_ray.config.conflicts import conflicts
from hypha_ray.config.keys import KeyPath, key_at, mend, shown, values
from hypha_ray.config.schema import Job
from hypha_ray.errors import ConfigError
from hypha_ray.families import FAMILIES
from hypha_ray.files import files_hash
from hypha_ray.plugins import is_built_in, is_own, sources, unknown_option


def build(settings: Sequence[Setting]) -> Job:
    """Build a job from settings; the last setting of a key wins.

    Raises:
        ConfigError: CFG002 wrong type, CFG003 out of range, CFG011 two keys that exclude each other.

    """
    try:
        job = Job.model_validate(merged(settings))
    except ValidationError as error:
        raise _explained(error, settings) from None
    _agree(job, settings)
    return job


def require_complete(job: Job) -> None:
    """Check that the job names a model and a dataset, which a partial job file may lack.

    Raises:
        ConfigError: CFG012, with the missing keys.

    """
    if not job.model.repository and job.model.config is None and job.model.factory is None:
        fix = "give model.repository, or [model.config] or model.factory to start from random weights"
        raise ConfigError("CFG012", "the job has no model", fix=fix)
    configured = job.model.config or {}
    if not job.model.repository and job.model.factory is None and "model_type" not in configured:
        raise ConfigError("CFG012", "model.config has no model_type", fix='give one, such as model_type = "llama"')
    if not job.dataset.given:
        fix = "give dataset.path, a folder that jobs/prepare.py made, or dataset.name"
        raise ConfigError("CFG012", "the job has no dataset", fix=fix)


def in_groups(path: KeyPath) -> bool:
    """Whether a key says of all workers what ``[[workers]]`` says of each group."""
    return path[:2] in _IN_GROUPS


_IN_GROUPS = frozenset(
    [("bridge", "commands")]
    + [("resources", name) for name in ("num_workers", "worker", "min_memory_mb", "min_gpus", "gpu_type")]
)


def _explained(error: ValidationError, settings: Sequence[Setting]) -> ConfigError:
    """The first error that pydantic reports, in the terms of the schema, with file and line."""
    first: dict[str, Any] = dict(error.errors(include_url=False)[0])
    kind = first["type"]
    value = first["input"]
    place = tuple(map(str, first["loc"]))
    key = next(key for length in range(len(place) + 1) if (key := key_at(place[:length])))
    wrong_type = kind.endswith("_type") or (kind == "literal_error" and not isinstance(value, str))
    code, what = ("CFG002", "has the wrong type") if wrong_type else ("CFG003", "is out of range")
    secret = key.secret or key.name.endswith("_variable")  # A key may be given in place of its variable's name.
    got = "a value that is kept secret" if secret else shown(value)
    allowed = str(first["ctx"]["error"]) if kind == "value_error" else key.kind
    fix = f"{mend(value, key.kind)}, or leave it out{key.default_text and ' for ' + key.default_text}"
    return ConfigError(code, f"{_place(settings, key.name)} {what}", got, allowed, fix)


def _agree(job: Job, settings: Sequence[Setting]) -> None:
    workers = job.num_workers
    steps = job.inner_optimizer.total_steps
    counts = "workers" if job.workers else "resources.num_workers"
    worker_price = job.resources.worker_price
    server_price = job.resources.parameter_server_price
    limits = (
        ("resources.min_workers", job.resources.min_workers, counts, workers),
        ("bridge.commands", len(job.bridge.commands), "resources.num_workers", workers),
        ("sync.quorum", job.sync.quorum, counts, workers),
        ("resources.worker_price.bid", worker_price.bid, "resources.worker_price.max", worker_price.max),
        (
            "resources.parameter_server_price.bid",
            server_price.bid,
            "resources.parameter_server_price.max",
            server_price.max,
        ),
        ("rounds.warmup_rounds", job.rounds.warmup_rounds, "rounds.update_rounds", job.rounds.update_rounds),
        ("rl.minibatches", job.rl.minibatches, "rounds.max_batch_size", job.rounds.max_batch_size),
        ("inner_optimizer.warmup_steps", job.inner_optimizer.warmup_steps, "inner_optimizer.total_steps", steps),
    )
    for name, value, limit_name, limit in limits:
        if value is not None and limit is not None and value > limit:
            fix = f"mend {name} or {limit_name}"
            what = f"{_place(settings, name)} is more than {_place(settings, limit_name)}"
            raise ConfigError("CFG003", what, str(value), f"up to {limit}", fix)
    old = [setting for setting in settings if in_groups(setting.path)]
    if job.workers and old:
        (new, *_) = (setting for setting in settings if setting.path[0] == "workers")
        fix = "give number, needs and commands of workers in [[workers]] alone"
        raise ConfigError("CFG011", f"{old[-1].place} and {new.place} exclude each other", fix=fix)
    for first, second, fix in conflicts(job):
        what = f"{_place(settings, first)} and {_place(settings, second)} exclude each other"
        raise ConfigError("CFG011", what, fix=fix)


def _place(settings: Sequence[Setting], name: str) -> str:
    """The key, and the file and line or flag that set it."""
    places = [setting for setting in settings if ".".join(setting.path) == name]
    return places[-1].place if places else name


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
