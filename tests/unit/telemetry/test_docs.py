"""Boards, rules and the tables of docs/telemetry.md name what there is of events, fields and gauges, and no others."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hypha_ray.telemetry.news import KINDS
from hypha_ray.telemetry.series import RECORDED_BYTES, summary
from hypha_ray.telemetry.sinks.inputs import COMMIT_AGE, METRICS, TAGS
from tests.support.boards import FOLDER, boards, expressions
from tests.support.fleet import Fleet, job_of, slices_of

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
STAMPS = {"kind", "monotonic_s", "wall_time"}
RULES = FOLDER / "alerts.yml"
NAMES = re.compile(r"\b(?:ray_)?hypha_\w+")


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    _, _, rest = DOCS.partition(f"\n{title}\n")
    assert rest, f"docs/telemetry.md has no heading {title!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def table(title: str) -> dict[str, str]:
    """What the rows of a section's tables name in their first cell, and their second cell."""
    rows = re.findall(r"^\| (`.+?) \| (.*?) \|", section(title), flags=re.MULTILINE)
    named = {name: second for first, second in rows for name in re.findall(r"`([^`]+)`", first)}
    return {name: second for name, second in named.items() if second not in ("further fields", "unit")}


def texts(node: ast.expr) -> list[str]:
    """The values that an expression of constants may have."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=body, orelse=orelse):
            return [*texts(body), *texts(orelse)]
    raise AssertionError(f"the kind of an event is no constant: {ast.unparse(node)}")


def calls() -> Iterator[tuple[str, set[str]]]:
    """Kinds of events and the fields that they are made with, wherever the scheduler makes one."""
    for file in sorted((ROOT / "hypha_ray" / "scheduler").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.keywords:
                continue
            if node.func.attr in {"note", "event"}:
                for kind in texts(node.args[0]):
                    yield kind, {keyword.arg for keyword in node.keywords if keyword.arg is not None}


def made() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for kind, fields in calls():
        found.setdefault(kind, set()).update(fields)
    return found


def test_every_kind_of_event_is_documented_and_every_documented_one_exists() -> None:
    assert set(table("### Events")) == set(made())


def test_fields_of_every_event_are_documented() -> None:
    for kind, fields in made().items():
        assert fields <= set(re.findall(r"`(\w+)`", table("### Events")[kind])), kind


def test_notes_of_a_fleet_have_documented_kinds_and_fields_only() -> None:
    fleet = run_with_every_fault()
    assert {note["kind"] for note in fleet.notes} >= {"join", "loss", "leaving", "leave", "plan", "hire", "attempt"}
    for note in fleet.notes:
        documented = set(re.findall(r"`(\w+)`", table("### Events")[note["kind"]]))
        assert set(note) - STAMPS <= documented, note


def test_console_section_names_the_kinds_that_are_shown() -> None:
    (sentence,) = re.findall(r"Events of the kinds (.+?) are \[lines of the console\]", section("### Events"))
    assert set(re.findall(r"`(\w+)`", sentence)) == KINDS


def run_with_every_fault() -> Fleet:
    rounds = {"update_rounds": 6, "samples_between_updates": 240, "max_batch_size": 4}
    fleet = Fleet(job_of(rounds=rounds), [0.1, 0.1, 0.1], slices_of())
    fleet.later(3.0, lambda: fleet.kill(1))
    fleet.later(6.0, lambda: fleet.preempt(2))
    return fleet.run()


FLEETS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "async": {"sync": {"strategy": "async"}},
    "sync": {"sync": {"strategy": "sync"}},
}


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """Metrics of one small run of every strategy."""
    rounds = {"update_rounds": 4, "samples_between_updates": 240, "max_batch_size": 4}
    fleets = [Fleet(job_of(rounds=rounds, **tables), [0.1, 0.2], slices_of()) for tables in FLEETS.values()]
    return [record for fleet in fleets for record in fleet.run().records]


@pytest.mark.parametrize("kind", ["round", "eval", "step"])
def test_fields_of_metrics_are_those_that_are_documented(records: list[dict[str, Any]], kind: str) -> None:
    found = {field for record in records if record["kind"] == kind for field in record}
    assert found - {"kind"} == set(table(f'### `kind: "{kind}"`')) - ABSENT_HERE


ABSENT_HERE = {"accuracy", "bytes_from", "cost", "metric/NAME", "mfu", "mfu_by_worker", "peak_memory_bytes"}
ABSENT_HERE |= {"margin", "reward_chosen", "reward_rejected", "train_accuracy"}  # Of preferences.
"""Documented fields that records lack of a fleet of language models on CPUs, without own metrics, reads and prices."""


def test_kinds_of_metrics_are_those_that_are_documented(records: list[dict[str, Any]]) -> None:
    assert {record["kind"] for record in records} == set(re.findall(r'^### `kind: "(\w+)"`', DOCS, flags=re.MULTILINE))


def test_fields_of_the_summary_are_those_that_are_documented(records: list[dict[str, Any]]) -> None:
    added = {"parameter_bytes", "attempt", "dropped", "sinks", RECORDED_BYTES}
    documented = set(table("### `summary.json`"))
    assert set(summary(records)) | added == documented - {"accuracy", "best_accuracy"}


def test_gauges_are_those_that_are_documented() -> None:
    rows = table("## Ray's dashboard, Prometheus, Grafana")
    documented = {name.partition("{")[0]: name.partition("{")[2].rstrip("}") or None for name in rows}
    assert documented == {metric.name: metric.tag for metric in (*METRICS, COMMIT_AGE)}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def test_every_query_is_of_gauges_that_ray_exports() -> None:
    exported = {f"ray_{name}" for name in TAGS}
    queries = [query for _, query in expressions()] + [str(rule["expr"]) for rule in rules()]
    assert len(queries) > 20
    for query in queries:
        names = NAMES.findall(query)
        assert names and set(names) <= exported, query


def test_every_gauge_is_on_a_board() -> None:
    shown = {name for _, query in expressions() for name in NAMES.findall(query)}
    assert shown == {f"ray_{name}" for name in TAGS}


def test_legends_name_tags_that_the_gauge_has() -> None:
    for board in boards():
        for panel in board["panels"]:
            for target in panel["targets"]:
                (name,) = NAMES.findall(target["expr"])
                tags = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                own_tag = TAGS[name.removeprefix("ray_")]
                assert tags == {"run"} | ({own_tag} if own_tag else set()), target


def test_boards_ask_the_chosen_datasource_and_are_told_apart() -> None:
    for board in boards():
        assert board["id"] is None and "__inputs" not in board
        datasource, run = board["templating"]["list"]
        assert (datasource["name"], datasource["type"], datasource["query"]) == (
            "datasource",
            "datasource",
            "prometheus",
        )
        chosen = {"type": "prometheus", "uid": "${datasource}"}
        assert run["name"] == "run" and run["datasource"] == chosen
        for panel in board["panels"]:
            assert panel["datasource"] == chosen and panel["title"]
            assert all(
                target["datasource"] == chosen and '{run=~"$run"}' in target["expr"] for target in panel["targets"]
            )
        positions = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
        assert len(positions) == len(board["panels"]) == len({panel["id"] for panel in board["panels"]})
    assert len({board["uid"] for board in boards()}) == len(boards()) == 2


def test_rules_tell_which_run_they_are_about() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules()) >= 5
    for rule in rules():
        assert "$labels.run" in rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus isn't installed")
def test_prometheus_takes_the_rules() -> None:
    checked = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and f"{len(rules())} rules found" in checked.stdout, checked.stderr
