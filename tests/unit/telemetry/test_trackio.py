"""trackio: its database in the run directory, written and read back by trackio itself in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.curves import expected_curves
from tests.support.fleet import fleet_records

pytestmark = pytest.mark.skipif(find_spec("trackio") is None, reason="it is an extra")

CODE = """
import json, pathlib, sys
from hypha_ray.telemetry.sinks.base import build
folder = pathlib.Path(sys.argv[1])
for attempt in json.load(sys.stdin):
    sinks = build(folder, "fleet", ["trackio"], patience_s=120.0)
    sinks.start({"rounds": {"update_rounds": 2}, "dataset": {"path": "sftp://me:s3cr3t@host/data"},
        "run": {"notes": "a remark", "tags": ["baseline", "long"]}})
    for record in attempt:
        sinks.event(record) if record["kind"] in ("alert", "alert_over", "join") else sinks.record(record)
    sinks.summary({"rounds": 2, "loss": 2.5})
    sinks.close()
    assert sinks.losses()["trackio"] == {"failed": 0, "dropped": 0}, sinks.problems()
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_run_records("hypha_ray")
print("READ", json.dumps([
    {
        "name": run["name"],
        "logs": SQLiteStorage.get_logs("hypha_ray", run["name"], run_id=run["id"]),
        "alerts": SQLiteStorage.get_alerts("hypha_ray", run["name"], run_id=run["id"]),
        "config": SQLiteStorage.get_run_config("hypha_ray", run["name"], run_id=run["id"]),
    }
    for run in runs
], default=str))
"""
ALERT = {"kind": "alert", "alert": "loss > 5", "text": "loss is 7.5, above 5, after round 2", "round": 1}


def written(folder: Path, attempts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs that trackio has of some attempts of a job."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO_", "HF_"))}
    environment = {**clean, "HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CODE, str(folder / "run")]
    attempts_json = json.dumps(attempts)
    ended = subprocess.run(command, input=attempts_json, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    runs: list[dict[str, Any]] = json.loads(ended.stdout.partition("READ ")[2])
    return runs


def curves_of(run: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in run["logs"]:
        for name, value in row.items():
            if "/" in name and not name.startswith("summary/"):
                curves.setdefault(name, []).append((row["step"], value))
    return {name: sorted(points) for name, points in curves.items()}


def test_trackio_has_the_curves_of_each_attempt_and_an_alert_once(tmp_path: Path) -> None:
    records = fleet_records()
    first = [record for record in records if record["round"] <= 2]
    second = [record for record in records if record["round"] > 2]
    events = [ALERT, {**ALERT, "kind": "alert_over"}, {"kind": "join", "worker": 0}]
    runs = written(tmp_path, [[*first, *events], second])
    assert [run["name"] for run in runs] == ["fleet", "fleet"]
    for run, expected in zip(runs, (first, second), strict=True):
        curves = {name: sorted(points) for name, points in expected_curves(expected).items()}
        assert curves_of(run) == curves
        assert run["config"]["dataset"] == {"path": "sftp://me:***@host/data"}
        assert run["config"]["_Username"] is None
        assert (run["config"]["notes"], run["config"]["tags"]) == ("a remark", "baseline, long")
    ((alert,), none) = (run["alerts"] for run in runs)
    assert none == []
    assert (alert["title"], alert["text"], alert["level"], alert["step"]) == (ALERT["alert"], ALERT["text"], "warn", 1)
    assert list((tmp_path / "run" / "trackio").glob("*.db"))
    assert not list((tmp_path / "home").rglob("*.db"))
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"s3cr3t" in path.read_bytes()]
