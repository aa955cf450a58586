"""Flaws of a job's alerts that no key shows by itself, each with its fix."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hypha_ray.config.keys import shown
from hypha_ray.config.schema import Job
from hypha_ray.config.tables.alerts import (
    COMMIT_AGE,
    MEDIANS,
    PREFERENCE_FIELDS,
    Alert,
    Metric,
    find_metric,
    nearest_metric,
)
from hypha_ray.config.value_types import is_malformed
from hypha_ray.errors import ConfigError

_ASYNC = 'sync.strategy = "async"'
_METRICS = "a field of docs/telemetry.md, commit_age_s or workers"


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
        other = tables_by_title.setdefault(alert.title, table)
        if other != table:
            problem = f"has the name of {other}"
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
