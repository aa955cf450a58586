"""TensorBoard: real files, written and read back."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.preflight.checks import check_job
from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks import inputs
from hypha_ray.telemetry.sinks.base import Tally, build
from hypha_ray.telemetry.sinks.files import METRICS, read_jsonl, rewind
from hypha_ray.telemetry.sinks.inputs import SinkPlace
from hypha_ray.telemetry.sinks.tensorboard import TensorBoard
from tests.support.curves import track
from tests.support.fleet import fleet_records

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="it is an extra")


def written(directory: Path, folder: str = "tensorboard") -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / folder), {"scalars": 0, "tensors": 0})
    found.Reload()
    return found


@needs_tensorboard
def test_tensorboard_has_the_curves_of_the_metrics_file(tmp_path: Path) -> None:
    config = {"run": {"notes": "larger batch", "tags": ["baseline", "long"]}, "rounds": {"update_rounds": 2}}
    track(tmp_path, fleet_records(), "tensorboard", config)
    found, records = written(tmp_path), read_jsonl(tmp_path / "metrics.jsonl")
    for kind, group in (("round", "round"), ("eval", "eval"), ("step", "worker-1")):
        mine = [record for record in records if record["kind"] == kind and record.get("worker", 1) == 1]
        names = {name for record in mine for name, value in record.items() if isinstance(value, int | float)}
        assert mine and {"loss", "val_loss"} & names
        for name in names - {"round", "worker"}:
            expected = [record[name] for record in mine if record[name] is not None]
            curve = found.Scalars(f"{group}/{name}")
            assert [point.value for point in curve] == pytest.approx(expected, rel=1e-6), name
            if kind != "step":
                assert [point.step for point in curve] == [r["round"] for r in mine if r[name] is not None]
    assert found.Scalars("summary/loss")[0].value == 2.5
    assert b"update_rounds" in found.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert found.Tensors("notes/text_summary")[0].tensor_proto.string_val[0] == b"larger batch"
    assert found.Tensors("tags/text_summary")[0].tensor_proto.string_val[0] == b"baseline, long"


@needs_tensorboard
def test_tensorboard_of_a_resumed_run_has_one_value_a_step(tmp_path: Path) -> None:
    records = fleet_records()
    attempts = [[one for one in records if one["round"] <= 2], [one for one in records if one["round"] >= 2]]
    for number, attempt in enumerate(attempts):
        rewind(tmp_path / METRICS, 2)
        sinks = build(tmp_path, "fleet", ["tensorboard"], patience_s=240.0)
        sinks.start({"attempt": number})
        for record in attempt:
            sinks.record(record)
        sinks.close()
        assert sinks.losses()["tensorboard"] == {"failed": 0, "dropped": 0}
    found, kept = written(tmp_path), read_jsonl(tmp_path / METRICS)
    assert found.Tags()["scalars"]
    for tag in found.Tags()["scalars"]:
        steps = [point.step for point in found.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag
    reports = [record["loss"] for record in kept if record["kind"] == "step" and record["worker"] == 0]
    assert [point.value for point in found.Scalars("worker-0/loss")] == pytest.approx(reports, rel=1e-6)
    losses = [record["loss"] for record in kept if record["kind"] == "round"]
    assert [point.value for point in found.Scalars("round/loss")] == pytest.approx(losses, rel=1e-6)


@needs_tensorboard
def test_tensorboard_that_is_started_again_counts_reports_from_the_first_one(tmp_path: Path) -> None:
    losses = [3.0, 2.0]
    lines = [json.dumps({"kind": "step", "worker": 0, "round": 0, "loss": loss}) + "\n" for loss in losses]
    (tmp_path / METRICS).write_text("".join(lines))
    sink = TensorBoard(SinkPlace("fleet", tmp_path, Tally("tensorboard")))
    sink.start({})
    sink.start({})
    sink.close()
    assert [(point.step, point.value) for point in written(tmp_path).Scalars("worker-0/loss")] == [(0, 3.0), (1, 2.0)]


@needs_tensorboard
def test_tensorboard_of_two_runs_with_one_folder_shows_both(tmp_path: Path) -> None:
    for number, run in enumerate(("first", "second")):
        sinks = build(tmp_path / run, run, ["tensorboard"], patience_s=240.0, trackers=str(tmp_path / "all"))
        sinks.start({})
        sinks.record({"kind": "eval", "round": 0, "val_loss": 2.0 + number})
        sinks.close()
    for number, run in enumerate(("first", "second")):
        (point,) = written(tmp_path / "all", f"tensorboard/{run}").Scalars("eval/val_loss")
        assert point.value == 2.0 + number
        assert not (tmp_path / run / "tensorboard").exists()


@needs_tensorboard
def test_tensorboard_point_has_the_time_of_its_record(tmp_path: Path) -> None:
    sinks = build(tmp_path, "fleet", ["tensorboard"], patience_s=240.0)
    sinks.start({})
    sinks.record({"kind": "eval", "round": 0, "val_loss": 2.0, "wall_time": "2026-01-02T03:04:05.000+00:00"})
    sinks.close()
    (point,) = written(tmp_path).Scalars("eval/val_loss")
    assert point.wall_time == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_tracker_that_is_not_installed_is_refused_before_a_start(monkeypatch: pytest.MonkeyPatch, tracker: str) -> None:
    job = Job.model_validate({"telemetry": {"sinks": [tracker]}})
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"CFG022.*{tracker}, which isn't installed.*pip install {tracker}"):
        check_job(job)
