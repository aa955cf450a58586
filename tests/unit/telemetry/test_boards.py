"""Boards for Grafana and rules for Prometheus: each query asks for gauges that exist, with tags that they have."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from hypha_ray.telemetry.sinks.inputs import TAGS
from tests.support.boards import FOLDER, boards, expressions

RULES = FOLDER / "alerts.yml"
NAMES = re.compile(r"\b(?:ray_)?hypha_\w+")


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
