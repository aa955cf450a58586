"""Alerts of a job file: what is taken, what is refused and with which advice, and which metrics there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.checks import check_destinations
from hypha_ray.config.load import from_tables, load
from hypha_ray.config.training import (
    EVAL_FIELDS,
    IN_REPORTS,
    OTHER_FIELDS,
    PREFERENCE_FIELDS,
    ROUND_FIELDS,
    SHARES,
    STEP_FIELDS,
    TASK_FIELDS,
    Metric,
    find_metric,
)
from hypha_ray.driver.preflight.checks import check_job
from hypha_ray.errors import ConfigError
from hypha_ray.fleet_time import TIME_KINDS
from tests.support.fleet import Fleet, job_of, slices_of

DOCS = Path(__file__).parents[3] / "docs"
AGE: dict[str, Any] = {"metric": "commit_age_s", "op": ">", "value": 600, "for_s": 0}
LOSS: dict[str, Any] = {"metric": "loss", "op": ">", "value": 5.0, "for_rounds": 2}


def job(*alerts: dict[str, Any], **tables: Any) -> Job:
    return from_tables({"telemetry": {"alerts": list(alerts)}, **tables})


def without(alert: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in alert.items() if name not in names}


@pytest.mark.parametrize(
    ("alert", "code", "texts"),
    [
        ({**LOSS, "metric": "comit_age_s"}, "CFG003", ("'comit_age_s'", "did you mean 'commit_age_s'?")),
        ({**LOSS, "metric": "valloss"}, "CFG003", ("did you mean 'val_loss'?",)),
        ({**LOSS, "metric": "LOSS"}, "CFG003", ("did you mean 'loss'?",)),
        ({**LOSS, "metric": "eval/perplexty"}, "CFG003", ("did you mean 'eval/perplexity'?",)),
        ({**LOSS, "metric": "eval/goodput"}, "CFG003", ("'eval/goodput'", "did you mean 'goodput'?")),
        ({**LOSS, "metric": "batches"}, "CFG003", ("batches",)),
        ({**LOSS, "metric": "Ω"}, "CFG003", ("docs/telemetry.md",)),
        ({**LOSS, "metric": "metric/f1"}, "CFG003", ("metric/f1", "model.metrics")),
        ({**LOSS, "metric": "reward"}, "CFG011", ("reward", "rl.algorithm")),
        ({**LOSS, "metric": "margin"}, "CFG011", ("margin", "preference.loss")),
        ({**LOSS, "metric": "equal_groups"}, "CFG011", ("a metric of this job, such as loss, val_loss",)),
        ({**LOSS, "metric": "staleness_max"}, "CFG011", ('sync.strategy = "async"',)),
        ({**LOSS, "op": "=>"}, "CFG003", ("'=>'", "above_median_times", "write >=")),
        ({**LOSS, "op": "above_median"}, "CFG003", ("write above_median_times",)),
        ({**LOSS, "for_s": 3}, "CFG011", ("for_rounds", "for_s")),
        (without(LOSS, "for_rounds"), "CFG012", ("for_rounds or for_s",)),
        (without(LOSS, "metric"), "CFG012", ("metric",)),
        (without(LOSS, "op"), "CFG012", ("op",)),
        (without(LOSS, "value"), "CFG012", ("value",)),
        ({**LOSS, "op": "above_median_times", "value": 0.0}, "CFG003", ("value", "number ≥ 1")),
        ({**LOSS, "op": "above_median_times", "value": 0.5}, "CFG003", ("value", "number ≥ 1", "2.0")),
        ({**LOSS, "op": "below_median_times", "value": 0.0}, "CFG003", ("value", "number > 0 and ≤ 1")),
        ({**LOSS, "op": "below_median_times", "value": 1.5}, "CFG003", ("value", "number > 0 and ≤ 1", "0.5")),
        ({**AGE, "op": "above_median_times"}, "CFG011", ("op", "median")),
        ({**without(AGE, "for_s"), "for_rounds": 1}, "CFG011", ("for_rounds", "for_s")),
        ({**LOSS, "for_rounds": 0}, "CFG003", ("for_rounds", "≥ 1")),
        ({**AGE, "for_s": -1}, "CFG003", ("for_s", "≥ 0")),
        ({**LOSS, "value": float("nan")}, "CFG003", ("value",)),
        ({**LOSS, "command": []}, "CFG003", ("command", "program")),
        ({**LOSS, "command": "notify me"}, "CFG002", ("command", "list of text")),
        ({**LOSS, "threshold": 3}, "CFG001", ("threshold",)),
        ({**LOSS, "for_round": 3}, "CFG001", ("for_rounds",)),
    ],
)
def test_wrong_alert_is_refused_with_the_key_and_advice(
    alert: dict[str, Any], code: str, texts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        job(AGE, alert)
    assert caught.value.code == code
    for text in ("telemetry.alerts.1", *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("alert", "remedy"),
    [
        ({**LOSS, "metric": 3}, "Fix: write a text"),
        ({**LOSS, "op": "!"}, "Fix: write one of these"),
        (
            {**LOSS, "op": "gt"},
            "got 'gt', allowed > | >= | < | <= | above_median_times | below_median_times. Fix: write >",
        ),
        ({**LOSS, "op": "≤"}, "Fix: write <="),
        ({**LOSS, "value": "x"}, "Fix: write a number"),
        ({**LOSS, "value": float("inf")}, "Fix: write a number"),
        ({**LOSS, "command": "notify"}, "Fix: write a list of text, or leave it out"),
    ],
)
def test_key_that_an_alert_must_have_is_never_to_be_left_out(alert: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(alert)
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize(
    ("metric", "tables", "need"),
    [
        ("val_loss", {"rl": {"algorithm": "grpo"}}, "no job with rl.algorithm has"),
        ("value_loss", {"rl": {"algorithm": "grpo"}}, 'rl.advantage = "gae"'),
        ("turns", {"rl": {"algorithm": "grpo"}}, "rl.environment"),
        ("staleness", {"rl": {"algorithm": "grpo"}}, "rl.staleness"),
        ("validation/reward", {"rl": {"algorithm": "grpo"}}, "rl.evaluation.every_steps"),
        ("perplexity", {"preference": {"loss": "dpo"}}, "no job with preference.loss has"),
    ],
)
def test_metric_that_no_record_of_the_job_has_is_refused(metric: str, tables: dict[str, Any], need: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job({**LOSS, "metric": metric}, **tables)
    assert caught.value.code == "CFG011" and need in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "tables"),
    [
        ("value_loss", {"rl": {"algorithm": "ppo"}}),
        ("reward", {"rl": {"algorithm": "grpo"}}),
        ("staleness_max", {"sync": {"strategy": "async"}}),
        ("margin", {"preference": {"loss": "dpo"}}),
    ],
)
def test_metric_that_the_job_has_is_taken(metric: str, tables: dict[str, Any]) -> None:
    (alert,) = job({**LOSS, "metric": metric}, **tables).telemetry.alerts
    assert alert.metric == metric


def test_wrong_alert_of_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[[telemetry.alerts]]\nop = ">"\nvalue = 1\nfor_s = 0\nmetric = "goodputt"\n')
    with pytest.raises(ConfigError, match=r"job\.toml:5.*did you mean 'goodput'\?"):
        load(["@", str(file)])


def test_two_alerts_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.alerts\.1 has the name of telemetry\.alerts\.0"):
        job(LOSS, {**LOSS, "for_rounds": 7})
    assert len(job(LOSS, {**LOSS, "name": "again"}).telemetry.alerts) == 2


def test_address_in_place_of_its_variable_is_refused_and_never_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        job({**LOSS, "url_env": "https://hooks.example/T0/s3cr3t"})
    assert caught.value.code == "CFG003" and "the name of an environment variable" in str(caught.value)
    assert "s3cr3t" not in str(caught.value) and "hooks.example" not in str(caught.value)


@pytest.mark.parametrize("value", [None, "", "hooks.example/s3cr3t", "ftp://hooks.example/s3cr3t", "http:///s3cr3t"])
def test_webhook_without_an_address_is_refused_before_the_start(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEAM_HOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("TEAM_HOOK", value)
    with pytest.raises(ConfigError, match=r"telemetry\.alerts\.0\.url_env.*TEAM_HOOK") as caught:
        check_job(job({**LOSS, "url_env": "TEAM_HOOK"}))
    assert caught.value.code == "CFG024" and "s3cr3t" not in str(caught.value)


def test_webhook_with_an_address_and_program_that_exists_are_taken(tmp_path: Path) -> None:
    program = tmp_path / "page"
    alert = {**LOSS, "url_env": "TEAM_HOOK", "command": [str(program), "-x"]}
    environment = {"TEAM_HOOK": "https://hooks.example/T0/s3cr3t"}
    with pytest.raises(ConfigError, match="no such program") as caught:
        check_destinations(job(alert), environment)
    assert caught.value.code == "CFG009"
    program.touch(mode=0o700)
    check_destinations(job(alert), environment)


def test_metric_is_a_field_of_rounds_unless_its_name_says_otherwise() -> None:
    assert find_metric("loss") == Metric("round", "loss")
    assert find_metric("step/loss") == Metric("step", "loss")
    assert find_metric("gradient_norm") == Metric("step", "gradient_norm")
    assert find_metric("val_loss") == Metric("eval", "val_loss")
    assert find_metric("eval/reward") == Metric("eval", "reward")
    assert find_metric("metric/macro_f1") == Metric("eval", "metric/macro_f1")
    assert find_metric("time_shares/barrier") == Metric("round", "time_shares/barrier")
    assert find_metric("workers") == Metric(None, "workers")
    assert find_metric("round/workers") == Metric("round", "workers")


def test_metrics_of_the_task_are_taken_in_reinforcement_learning_only() -> None:
    for name in ("reward", "equal_groups", "pass@4", "reward/exact", "eval/reward", "validation/reward"):
        alert = {**LOSS, "metric": name}
        rl = {"algorithm": "grpo", "evaluation": {"every_steps": 1}}
        assert job(alert, rl=rl).telemetry.alerts[0].metric == name
        with pytest.raises(ConfigError, match="which only jobs with"):
            job(alert)


def documented(page: str, heading: str) -> set[str]:
    """Names in the first cells of the first table below a heading."""
    _, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")
    section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return {
        name for cell in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE) for name in re.findall("`(.+?)`", cell)
    }


TABLES = {"time_shares", "time_by_worker", "batches", "batch_s", "peak_memory_bytes", "bytes_from", "mfu_by_worker"}
"""Documented fields of rounds that are tables, by worker and so on."""


def test_every_documented_number_may_be_watched_and_nothing_else() -> None:
    assert set(ROUND_FIELDS) == documented("telemetry.md", '### `kind: "round"`') - TABLES - set(PREFERENCE_FIELDS)
    assert set(EVAL_FIELDS) == documented("telemetry.md", '### `kind: "eval"`') - {
        "round",
        "metric/NAME",
        *PREFERENCE_FIELDS,
    }
    of_reports = documented("telemetry.md", '### `kind: "step"`') - {
        "worker",
        "incarnation",
        "round",
        *PREFERENCE_FIELDS,
    }
    assert set(IN_REPORTS) == of_reports and set(STEP_FIELDS) <= of_reports
    assert {*TABLES, "kind", "worker", "incarnation"} <= {*OTHER_FIELDS, *STEP_FIELDS}
    figures = documented("rl.md", "## Figures")
    assert set(TASK_FIELDS) - {"absent_rewards"} == {name for name in figures if re.fullmatch(r"\w+", name)}
    assert set(PREFERENCE_FIELDS) == documented("preferences.md", "## Figures") - {"accuracy"}
    for name in figures:
        assert find_metric(
            name.replace("NAME", "exact").replace("FIGURE", "depth").replace("…", "reward").replace("@k", "@8")
        ), name
    assert {share.partition("/")[2] for share in SHARES} == set(TIME_KINDS)


def test_every_number_of_a_real_record_may_be_watched() -> None:
    rounds = {"update_rounds": 3, "samples_between_updates": 240, "max_batch_size": 4}
    records = Fleet(job_of(rounds=rounds), [0.1, 0.2], slices_of()).run().records
    for record in records:
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("worker", "incarnation", "round"):
                assert find_metric(f"{record['kind']}/{name}") is not None, (record["kind"], name)
