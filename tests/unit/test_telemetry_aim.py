"""Aim: a real local repository, written and read back."""

from pathlib import Path
from typing import Any

import pytest

from hypha_ray.telemetry.sinks import build

# Aim 3.29 uses what SQLAlchemy 2 calls old.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CONFIG = {"rounds": {"update_rounds": 2}, "model": {"repository": None}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An Aim run of two rounds, opened for reading."""
    directory = tmp_path_factory.mktemp("run")
    sinks = build(directory, "tiny", ["aim"])
    sinks.start(CONFIG)
    for number, loss in enumerate((3.5, 2.5)):
        sinks.record({"kind": "eval", "round": number, "val_loss": loss + 1})
        sinks.record({"kind": "step", "worker": 1, "round": number, "loss": loss, "gradient_norm": None})
        sinks.record({"kind": "round", "round": number, "loss": loss, "batches": {"0": 6, "1": 4}, "sync_s": 0.25})
    sinks.event({"kind": "commit", "round": 1})
    sinks.summary({"rounds": 2, "loss": 2.5})
    sinks.close()
    assert sinks.losses()["aim"] == {"failed": 0, "dropped": 0}
    return reopened(directory)


def reopened(directory: Path) -> Any:
    import aim

    (run,) = aim.Repo.from_path(str(directory)).iter_runs()
    return run


def series(run: Any, name: str, context: dict[str, str]) -> list[tuple[int, float]]:
    (metric,) = [metric for metric in run.metrics() if metric.name == name and metric.context.to_dict() == context]
    steps, (values, _, _) = metric.data.numpy()
    return list(zip(steps.tolist(), values.tolist(), strict=True))


def test_aim_round_figures_are_read_back(run: Any) -> None:
    assert series(run, "loss", {"subset": "train"}) == [(0, 3.5), (1, 2.5)]
    assert series(run, "sync_s", {"subset": "train"}) == [(0, 0.25), (1, 0.25)]


def test_aim_evaluations_are_a_series_of_their_own(run: Any) -> None:
    assert series(run, "val_loss", {"subset": "val"}) == [(0, 4.5), (1, 3.5)]


def test_aim_worker_figures_carry_the_worker(run: Any) -> None:
    assert series(run, "batches", {"worker": "0"}) == [(0, 6.0), (1, 6.0)]
    assert series(run, "loss", {"worker": "1"}) == [(0, 3.5), (1, 2.5)]


def test_aim_keeps_configuration_and_summary(run: Any) -> None:
    assert run["config"] == CONFIG
    assert run["summary"] == {"rounds": 2, "loss": 2.5}


def test_aim_run_is_named_closed_and_without_system_metrics(run: Any) -> None:
    assert run.experiment == "tiny"
    assert not run.active
    assert {metric.name for metric in run.metrics()} == {"loss", "val_loss", "batches", "sync_s"}
