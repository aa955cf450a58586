"""Checks of a job: values in range, values that agree, and the presence of all that a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from hypha_ray.config.conflicts import conflicts
from hypha_ray.config.keys import KeyPath, key_at, shown
from hypha_ray.config.schema import Job
from hypha_ray.config.sources.assignments import Setting, merged
from hypha_ray.errors import ConfigError


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
    fix = f"mend it, or leave it out{key.default_text and ' for ' + key.default_text}"
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
