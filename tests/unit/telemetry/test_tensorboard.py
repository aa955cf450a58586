"""TensorBoard: real files, written and read back."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.preflight.checks import check_job
from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks import trackers
from hypha_ray.telemetry.sinks.base import build
from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.fleet import fleet_records

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="it is an extra")


def written(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / "tensorboard"), {"scalars": 0, "tensors": 0})
    found.Reload()
    return found


@needs_tensorboard
def test_tensorboard_has_the_curves_of_the_metrics_file(tmp_path: Path) -> None:
    sinks = build(tmp_path, "fleet", ["tensorboard"], patience_s=120.0)
    sinks.start({"rounds": {"update_rounds": 2}})
    for record in fleet_records():
        sinks.record(record)
    sinks.summary({"rounds": 2, "loss": 2.5})
    sinks.close()
    assert sinks.losses()["tensorboard"] == {"failed": 0, "dropped": 0}
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


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "mlflow"])
def test_tracker_that_is_not_installed_is_refused_before_a_start(monkeypatch: pytest.MonkeyPatch, tracker: str) -> None:
    job = Job.model_validate({"telemetry": {"sinks": [tracker]}})
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"CFG022.*{tracker}, which isn't installed.*pip install {tracker}"):
        check_job(job)
