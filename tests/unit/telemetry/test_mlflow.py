"""MLflow: its database in the run directory, written and read back by its own client."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.telemetry.sinks.base import Tally, build
from hypha_ray.telemetry.sinks.files import METRICS, read_jsonl, rewind
from hypha_ray.telemetry.sinks.inputs import SinkPlace
from hypha_ray.telemetry.sinks.mlflow import MLflow
from tests.support.curves import expected_curves, track
from tests.support.fleet import fleet_records

pytestmark = [
    pytest.mark.skipif(find_spec("mlflow") is None, reason="it is an extra"),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # MLflow's own use of SQLAlchemy
]

CONFIG = {"rounds": {"update_rounds": 2, "patience": None}, "dataset": {"path": "sftp://me:s3cr3t@host/data"}}
write = partial(track, sink="mlflow", config=CONFIG)


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without MLflow's variables; those that a test leaves behind vanish with it."""
    for name in ("TRACKING_URI", "EXPERIMENT_NAME", "DISABLE_TELEMETRY"):
        monkeypatch.setenv(f"MLFLOW_{name}", "")
        monkeypatch.delenv(f"MLFLOW_{name}")


def client_of(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def runs_of(client: Any, experiment: str = "hypha_ray") -> list[Any]:
    """Runs of an experiment, oldest first."""
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id], order_by=["attributes.start_time"]))


def curves_of(client: Any, run: Any) -> dict[str, list[tuple[int, float]]]:
    names = (name for name in run.data.metrics if not name.startswith("summary/"))
    return {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names}


@pytest.mark.slow
def test_mlflow_has_the_curves_of_the_metrics_file_and_one_run_an_attempt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = fleet_records()
    killed = [record for record in records if record["round"] <= 2]
    again = [record for record in records if record["round"] >= 2]
    write(tmp_path, killed)
    rewind(tmp_path / METRICS, 2)
    write(tmp_path, again)
    assert capfd.readouterr() == ("", "")
    client = client_of(f"sqlite:///{tmp_path / 'mlflow.db'}")
    first, second = runs_of(client)
    assert {"round/loss", "round/batches/worker-1", "eval/val_loss", "worker-0/loss"} <= set(expected_curves(records))
    assert curves_of(client, first) == expected_curves(killed)
    assert curves_of(client, second) == expected_curves(again)
    kept = expected_curves(read_jsonl(tmp_path / METRICS))
    for name in ("round/loss", "eval/val_loss"):
        both = dict(curves_of(client, first)[name]) | dict(curves_of(client, second)[name])
        assert list(both.items()) == kept[name]
    assert [run.info.run_name for run in (first, second)] == ["fleet", "fleet"]
    assert [run.info.status for run in (first, second)] == ["FINISHED", "FINISHED"]
    assert second.data.metrics["summary/loss"] == 2.5
    assert second.data.params == {"rounds.update_rounds": "2", "dataset.path": "sftp://me:***@host/data"}


@pytest.mark.slow
@pytest.mark.long
def test_mlflow_of_two_runs_with_one_folder_has_both(tmp_path: Path) -> None:
    for run in ("first", "second"):
        sinks = build(tmp_path / run, run, ["mlflow"], patience_s=240.0, trackers=str(tmp_path / "all"))
        sinks.start(CONFIG | {"run": {"notes": "larger batch", "tags": ["baseline", "a: b"]}})
        sinks.record({"kind": "eval", "round": 0, "val_loss": 2.0})
        sinks.close()
    found = runs_of(client_of(f"sqlite:///{tmp_path / 'all' / 'mlflow.db'}"))
    assert [run.info.run_name for run in found] == ["first", "second"]
    assert [run.data.metrics["eval/val_loss"] for run in found] == [2.0, 2.0]
    labels = {"mlflow.note.content": "larger batch", "baseline": "baseline", "a_ b": "a: b"}
    assert [labels.items() <= run.data.tags.items() for run in found] == [True, True]


@pytest.mark.slow
@pytest.mark.long
def test_mlflow_goes_where_its_variables_say_and_takes_names_with_other_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "others")
    run = tmp_path / "run"
    write(run, [{"kind": "eval", "round": 3, "reward": 0.5, "pass@1": 0.25}])
    client = client_of(uri)
    (found,) = runs_of(client, "others")
    assert curves_of(client, found) == {"eval/reward": [(3, 0.5)], "eval/pass_1": [(3, 0.25)]}
    assert sorted(path.name for path in run.iterdir()) == ["events.jsonl", "metrics.jsonl", "summary.json"]
    assert b"s3cr3t" not in (tmp_path / "elsewhere.db").read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_mlflow_takes_more_metrics_than_one_call_may_have(tmp_path: Path) -> None:
    sinks = build(tmp_path, "wide", ["mlflow"], patience_s=240.0)
    sinks.start(CONFIG)
    batches = {str(worker): worker for worker in range(1500)}
    sinks.record({"kind": "eval", "round": 0, "val_loss": 2.0})
    sinks.record({"kind": "round", "round": 0, "batches": batches})
    sinks.close()
    (found,) = runs_of(client_of(f"sqlite:///{tmp_path / 'mlflow.db'}"))
    assert found.data.metrics["round/batches/worker-1499"] == 1499 and found.data.metrics["eval/val_loss"] == 2.0


@pytest.mark.slow
def test_mlflow_whose_database_fails_counts_each_record_that_it_loses(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException

    tally = Tally("mlflow")
    sink = MLflow(SinkPlace("lost", tmp_path, tally))
    sink.start(CONFIG)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute("DROP TABLE metrics")
    for number in range(3):
        sink.record({"kind": "round", "round": number, "loss": 3.0})
    with pytest.raises(MlflowException):
        sink.close()
    assert tally.counts()["failed"] == 2, "the third one is counted by the caller, for the error"
