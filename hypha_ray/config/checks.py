"""Checks of a job: values in range, values that agree, its alerts, all that a run needs, options of its plug-ins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from hypha_ray.config.assignments import Setting, merged
from hypha_ray.config.conflicts import conflicts
from hypha_ray.config.keys import Key, KeyPath, choice_remedy, key_at, shown, values
from hypha_ray.config.schema import Job
from hypha_ray.config.training import (
    COMMIT_AGE,
    MEDIANS,
    PREFERENCE_FIELDS,
    Alert,
    Metric,
    find_metric,
    nearest_metric,
)
from hypha_ray.config.value_types import MACHINES_AT_MOST, is_malformed
from hypha_ray.errors import ConfigError
from hypha_ray.families import FAMILIES
from hypha_ray.files import files_hash
from hypha_ray.plugins import is_built_in, is_own, sources, unknown_option

_IN_GROUPS = frozenset(
    [
        ("bridge", "commands"),
        ("resources", "num_workers"),
        ("resources", "worker"),
        ("resources", "min_memory_mb"),
        ("resources", "min_gpus"),
        ("resources", "gpu_type"),
    ]
)
_ASYNC = 'sync.strategy = "async"'
_METRICS = "a field of docs/telemetry.md, commit_age_s or workers"


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


def _explained(error: ValidationError, settings: Sequence[Setting]) -> ConfigError:
    """The first error that pydantic reports, in the terms of the schema, with file and line."""
    first_error: dict[str, Any] = dict(error.errors(include_url=False)[0])
    error_type = first_error["type"]
    value = first_error["input"]
    key = _key_on(tuple(map(str, first_error["loc"])))
    is_secret = key.secret or key.name.endswith(
        ("_variable", "url_env")
    )  # A key may be given in place of its variable's name.
    got = "a value that is kept secret" if is_secret else shown(value)
    allowed = str(first_error["ctx"]["error"]) if error_type == "value_error" else key.kind
    if error_type == "too_short":
        allowed = f"{key.kind}, {first_error['ctx']['min_length']} or more"
    is_prose = error_type == "value_error" and " | " not in allowed
    remedy = "write what is allowed" if is_prose else choice_remedy(value, allowed)
    if key.family is not None and isinstance(value, str) and remedy in ("write one of these", "write what is allowed"):
        remedy = f"{remedy}, or install the package that has it"  # The job may be that of a run on another machine.
    fix = remedy if key.required else f"{remedy}, or leave it out"
    if key.default_text and value != key.default:
        fix = f"{fix} for {key.default_text}"
    location = _location(settings, key.name)
    if error_type.endswith("_type") or (error_type == "literal_error" and not isinstance(value, str)):
        return ConfigError("CFG002", f"{location} has the wrong type", got, allowed, fix)
    return ConfigError("CFG003", f"{location} is out of range", got, allowed, fix)


def _key_on(path: KeyPath) -> Key:
    """The key that a path is, or leads into."""
    for length in range(len(path) + 1):
        key = key_at(path[:length])
        if key is not None:
            return key
    raise ValueError(f"there is no key at {path}")


def _agree(job: Job, settings: Sequence[Setting]) -> None:
    for name, value, limit_name, limit in _limits(job):
        if value is not None and limit is not None and value > limit:
            fix = f"mend {name} or {limit_name}"
            problem = f"{_location(settings, name)} is more than {_location(settings, limit_name)}"
            raise ConfigError("CFG003", problem, str(value), f"up to {limit}", fix)
    without_groups = [setting for setting in settings if in_groups(setting.path)]
    if job.workers and without_groups:
        of_groups = [setting for setting in settings if setting.path[0] == "workers"]
        problem = f"{without_groups[-1].key_location} and {of_groups[0].key_location} exclude each other"
        raise ConfigError("CFG011", problem, fix="give number, needs and commands of workers in [[workers]] alone")
    if job.num_workers > MACHINES_AT_MOST:
        problem = f"{_location(settings, 'workers')} has too many workers"
        raise ConfigError("CFG003", problem, str(job.num_workers), f"up to {MACHINES_AT_MOST}", "lower the counts")
    for first, second, fix in conflicts(job):
        problem = f"{_location(settings, first)} and {_location(settings, second)} exclude each other"
        raise ConfigError("CFG011", problem, fix=fix)
    for flaw in flaws_of_alerts(job):
        problem = f"{_location(settings, flaw.key)} {flaw.problem}"
        raise ConfigError(flaw.code, problem, flaw.got, flaw.allowed, flaw.fix)


def _limits(job: Job) -> Iterator[tuple[str, float | None, str, float | None]]:
    """Names and values of keys, each with the key that limits it; None: not set."""
    resources = job.resources
    rounds = job.rounds
    inner = job.inner_optimizer
    workers = job.num_workers
    workers_key = "workers" if job.workers else "resources.num_workers"
    yield "resources.min_workers", resources.min_workers, workers_key, workers
    yield "bridge.commands", len(job.bridge.commands), "resources.num_workers", workers
    quorum = None if job.sync.quorum == "auto" else job.sync.quorum
    yield "sync.quorum", quorum, workers_key, workers
    prices = {"worker_price": resources.worker_price, "parameter_server_price": resources.parameter_server_price}
    for name, price in prices.items():
        yield f"resources.{name}.bid", price.bid, f"resources.{name}.max", price.max
    if rounds.epochs is None:
        yield "rounds.warmup_rounds", rounds.warmup_rounds, "rounds.update_rounds", rounds.update_rounds
    yield "rl.minibatches", job.rl.minibatches, "rounds.max_batch_size", rounds.max_batch_size
    yield "inner_optimizer.warmup_steps", inner.warmup_steps, "inner_optimizer.total_steps", inner.total_steps


def _location(settings: Sequence[Setting], name: str) -> str:
    """The key, and the file and line or flag that set it."""
    for setting in reversed(settings):
        if ".".join(setting.path) == name:
            return setting.key_location
    return name


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
    hashes = {}
    for use in plugin_uses(job):
        files = sources(use.family, use.name)
        if files:
            hashes[f"{use.key} {use.name}"] = files_hash(files)
    return hashes


def check_options(job: Job) -> None:
    """Refuse options of built-in members, which have none, and of members that the job doesn't name.

    Raises:
        ConfigError: CFG001.

    """
    for use in _all_uses(job):
        if use.options and is_built_in(use.family, use.name):
            noun = FAMILIES[use.family].noun
            problem = f"{use.key}_options: {noun} {use.name} has no options"
            raise ConfigError("CFG001", problem, ", ".join(use.options), fix="leave the table out")
    for key, value in values(job):
        if key.family is None or value is not None:
            continue
        options = _options_of(job, key.name)
        if options:
            noun = FAMILIES[key.family].noun
            problem = f"{key.name}_options: the job names no {noun} of its own"
            raise ConfigError("CFG001", problem, ", ".join(options), fix=f"leave the table out, or set {key.name}")
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
            continue
        options_by_name = options or {}
        for name in value:
            yield PluginUse(key.family, key.name, name, options_by_name.get(name))


def _options_of(job: Job, key: str) -> Mapping[str, Any] | None:
    *tables, name = key.split(".")
    table: Any = job
    for part in tables:
        table = table[int(part)] if isinstance(table, list) else getattr(table, part)
    options: Mapping[str, Any] | None = getattr(table, f"{name}_options", None)
    return options


class AlertFlaw(NamedTuple):
    """Flaw of an alert, in the terms of an error."""

    code: str
    key: str
    """Key that is wrong, or the table that lacks one."""
    problem: str
    """Rest of a sentence that begins with the key."""
    got: str
    allowed: str
    fix: str


def flaws_of_alerts(job: Job) -> Iterator[AlertFlaw]:
    """All flaws of the job's alerts, in their order."""
    tables_by_title: dict[str, str] = {}
    for number, alert in enumerate(job.telemetry.alerts):
        table = f"telemetry.alerts.{number}"
        yield from _missing_keys(table, alert)
        yield from _of_metric(table, alert, job)
        yield from _of_values(table, alert)
        other_table = tables_by_title.setdefault(alert.title, table)
        if other_table != table:
            problem = f"has the name of {other_table}"
            yield AlertFlaw("CFG011", table, problem, alert.title, "", "give one of them another name")


def _missing_keys(table: str, alert: Alert) -> Iterator[AlertFlaw]:
    examples = {"metric": '"loss"', "op": '">"', "value": "10.0"}
    for name in Alert.required:
        if getattr(alert, name) is None:
            yield AlertFlaw("CFG012", table, f"has no {name}", "", "", f"give one, such as {name} = {examples[name]}")
    if alert.for_rounds is None and alert.for_s is None:
        problem = "doesn't say for how long its condition must hold"
        yield AlertFlaw("CFG012", table, problem, "", "", "give for_rounds or for_s; for_s = 0 tells at once")
    if alert.for_rounds is not None and alert.for_s is not None:
        problem = f"and {table}.for_s exclude each other"
        yield AlertFlaw("CFG011", f"{table}.for_rounds", problem, "", "", "leave one of them out")


def _of_metric(table: str, alert: Alert, job: Job) -> Iterator[AlertFlaw]:
    name = str(alert.metric)
    metric = find_metric(name)
    key = f"{table}.metric"
    if metric is None:
        nearest = nearest_metric(name)
        fix = f"did you mean {nearest!r}?" if nearest else "take a name of docs/telemetry.md"
        yield AlertFlaw("CFG003", key, "is no metric", shown(name), _METRICS, fix)
        return
    fix = f"take a metric of this job, such as {_metrics_of(job)}"
    need = _unmet_need(metric, job)
    if need is not None:
        yield AlertFlaw("CFG011", key, f"is {name}, which only jobs with {need} have", "", "", f"set {need}, or {fix}")
    obstacle = _obstacle(metric, job)
    if obstacle is not None:
        yield AlertFlaw("CFG011", key, f"is {name}, which no job with {obstacle} has", "", "", fix)
    own_metrics = [f"metric/{member.rpartition(':')[2]}" for member in job.model.metrics]
    if metric.field.startswith("metric/") and metric.field not in own_metrics:
        problem = "isn't among the job's model.metrics"
        yield AlertFlaw("CFG003", key, problem, shown(name), ", ".join(own_metrics), "add it to model.metrics")
    if metric.kind is None and alert.op in MEDIANS:
        problem = f"is {alert.op}, but no record has values of {name} for a median"
        yield AlertFlaw("CFG011", f"{table}.op", problem, "", "", 'take op = ">" or op = "<"')
    if name == COMMIT_AGE and alert.for_rounds is not None:
        problem = f"has no meaning beside {COMMIT_AGE}, which grows as long as no round ends"
        yield AlertFlaw("CFG011", f"{table}.for_rounds", problem, "", "", "give for_s = 0")


def _unmet_need(metric: Metric, job: Job) -> str | None:
    """Setting without which no record of a job has the metric; None if the job has it, or may have it."""
    rl = job.rl
    if metric.is_of_rl and rl.algorithm is None:
        return "rl.algorithm"
    if metric.field in PREFERENCE_FIELDS and job.preference.loss is None:
        return "preference.loss"
    if metric.field.startswith("validation/") and rl.evaluation.every_steps is None:
        return "rl.evaluation.every_steps"
    needs: dict[str, tuple[bool, str]] = {
        **dict.fromkeys(("arrivals", "staleness_mean", "staleness_max"), (not job.sync.traits.has_barrier, _ASYNC)),
        **dict.fromkeys(("value_loss", "value_clip_share"), (rl.has_critic, 'rl.advantage = "gae"')),
        "turns": (rl.environment is not None, "rl.environment"),
        "extra_prompts": (rl.refill > 0, "rl.refill"),
        "by_generators": (rl.generators > 0, "rl.generators"),
        "staleness": (rl.staleness > 0, "rl.staleness"),
        "kl_coefficient": (rl.kl_target is not None, "rl.kl_target"),
    }
    is_met, need = needs.get(metric.field, (True, ""))
    return None if is_met else need


def _obstacle(metric: Metric, job: Job) -> str | None:
    """Setting that keeps the metric out of all records of a job; None if there is none."""
    if metric.field in ("val_loss", "perplexity") and job.rl.algorithm is not None:
        return "rl.algorithm"
    if metric.field == "perplexity" and job.preference.loss is not None:
        return "preference.loss"
    return None


def _metrics_of(job: Job) -> str:
    """Names of some metrics that a job has."""
    if job.rl.algorithm is not None:
        return "reward, equal_groups, entropy or eval/reward"
    if job.preference.loss is not None:
        return "loss, margin, train_accuracy or eval/accuracy"
    return "loss, val_loss, gradient_norm, workers or commit_age_s"


def _of_values(table: str, alert: Alert) -> Iterator[AlertFlaw]:
    if alert.op in MEDIANS and alert.value is not None:
        is_above = alert.op == "above_median_times"
        is_usual = alert.value < 1 if is_above else alert.value > 1
        if alert.value <= 0 or is_usual:
            allowed = "number ≥ 1" if is_above else "number > 0 and ≤ 1"
            fix = f"give the factor of the median, such as {2.0 if is_above else 0.5}; usual values are near 1"
            yield AlertFlaw("CFG003", f"{table}.value", "is out of range", f"{alert.value:g}", allowed, fix)
    if alert.command is not None and not all(alert.command[:1] or [""]):
        fix = 'name a program, such as ["/usr/local/bin/notify"]'
        yield AlertFlaw("CFG003", f"{table}.command", "names no program", "", "a program and its arguments", fix)


def check_destinations(job: Job, environment: Mapping[str, str]) -> None:
    """Check that the environment has the addresses of all webhooks, and that the programs of all alerts exist.

    Raises:
        ConfigError: CFG024, a variable isn't set, or has no address of a web server; CFG009, there is no such program.

    """
    for number, alert in enumerate(job.telemetry.alerts):
        table = f"telemetry.alerts.{number}"
        if alert.url_env is not None:
            _check_address(f"{table}.url_env", alert.url_env, environment.get(alert.url_env, ""))
        if alert.command is not None and shutil.which(alert.command[0]) is None:
            fix = "give a program that this machine has, or its whole path"
            raise ConfigError("CFG009", f"{table}.command: there is no such program", shown(alert.command[0]), fix=fix)


def _check_address(key: str, variable: str, url: str) -> None:
    if not url:
        fix = f"set {variable} to the webhook's address where the job is submitted and on the cluster's nodes"
        raise ConfigError("CFG024", f"{key} names a variable that isn't set", variable, fix=fix)
    if not url.startswith(("http://", "https://")) or is_malformed(url):
        problem = f"{key}: the value of {variable} is no address of a web server"
        allowed = "http://host/path or https://host/path"
        raise ConfigError("CFG024", problem, "a value that is kept secret", allowed, f"mend the value of {variable}")
