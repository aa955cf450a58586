"""Aim: a real local repository, written and read back."""

import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from hypha_ray.config import Job
from hypha_ray.driver.preflight.checks import check_job
from hypha_ray.errors import AuthenticationError, ConfigError
from hypha_ray.telemetry.sinks.base import build
from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.fleet import fleet_records

# Aim 3.29 uses what SQLAlchemy 2 calls old.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).parents[3]
CONFIG = {
    "run": {"notes": "larger batch", "tags": ["baseline", "a: b"]},
    "rounds": {"update_rounds": 2},
    "model": {"repository": None},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An Aim run of two rounds, opened for reading."""
    pytest.importorskip("aim", reason="Python 3.13 and newer have no Aim")
    directory = tmp_path_factory.mktemp("run")
    sinks = build(directory, "tiny", ["aim"], patience_s=120.0)
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


@pytest.mark.slow
def test_aim_round_figures_are_read_back(run: Any) -> None:
    assert series(run, "loss", {"subset": "train"}) == [(0, 3.5), (1, 2.5)]
    assert series(run, "sync_s", {"subset": "train"}) == [(0, 0.25), (1, 0.25)]


@pytest.mark.slow
def test_aim_evaluations_are_a_series_of_their_own(run: Any) -> None:
    assert series(run, "val_loss", {"subset": "val"}) == [(0, 4.5), (1, 3.5)]


@pytest.mark.slow
def test_aim_worker_figures_carry_the_worker(run: Any) -> None:
    assert series(run, "batches", {"worker": "0"}) == [(0, 6.0), (1, 6.0)]
    assert series(run, "loss", {"worker": "1"}) == [(0, 3.5), (1, 2.5)]


@pytest.mark.slow
def test_aim_has_the_numbers_of_the_metrics_file(tmp_path: Path) -> None:
    pytest.importorskip("aim", reason="Python 3.13 and newer have no Aim")
    sinks = build(tmp_path, "fleet", ["aim"], patience_s=120.0)
    sinks.start(CONFIG)
    for record in fleet_records():
        sinks.record(record)
    sinks.close()
    run, records = reopened(tmp_path), read_jsonl(tmp_path / "metrics.jsonl")
    for kind, context in (("round", {"subset": "train"}), ("eval", {"subset": "val"}), ("step", {"worker": "1"})):
        mine = [record for record in records if record["kind"] == kind and record.get("worker", 1) == 1]
        names = {name for record in mine for name, value in record.items() if isinstance(value, int | float)}
        for name in names - {"round", "worker"}:
            expected = [record[name] for record in mine if record[name] is not None]
            assert [value for _, value in series(run, name, context)] == pytest.approx(expected, rel=1e-6), name
        assert mine and {"loss", "val_loss"} & names


@pytest.mark.slow
def test_aim_keeps_configuration_and_summary(run: Any) -> None:
    assert run["config"] == CONFIG
    assert run["summary"] == {"rounds": 2, "loss": 2.5}


@pytest.mark.slow
def test_aim_has_the_labels_of_the_run(run: Any) -> None:
    assert (run.description, sorted(run.tags)) == ("larger batch", ["a: b", "baseline"])


@pytest.mark.slow
def test_aim_run_is_named_closed_and_without_system_metrics(run: Any) -> None:
    assert run.experiment == "tiny"
    assert not run.active
    assert {metric.name for metric in run.metrics()} == {"loss", "val_loss", "batches", "sync_s"}


def job(**telemetry: Any) -> Job:
    return Job.model_validate({"telemetry": {"sinks": ["aim"], **telemetry}})


@pytest.mark.skipif(find_spec("aim") is None, reason="Python 3.13 and newer have no Aim")
def test_aim_that_is_installed_passes_the_checks_before_a_start(tmp_path: Path) -> None:
    check_job(job(aim_repository=str(tmp_path)))


@pytest.mark.parametrize(
    ("installed", "text"),
    [
        (None, "telemetry.sinks has aim, which isn't installed. Fix: leave aim out of telemetry.sinks, or use Python"),
        ("2.7.4", "telemetry.sinks has aim, which is too old — got aim 2.7.4, allowed 3.29 or newer. Fix: leave"),
        ("3.9", "which is too old — got aim 3.9, allowed 3.29 or newer"),
    ],
)
def test_aim_that_is_not_there_or_too_old_is_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, text: str
) -> None:
    if installed is not None:
        about = tmp_path / f"aim-{installed}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: aim\nVersion: {installed}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError) as caught:
        check_job(job())
    assert text in str(caught.value) and caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_aim_server_is_refused_before_a_start() -> None:
    with pytest.raises(AuthenticationError, match="SEC002"):
        check_job(job(aim_repository="aim://host"))


@pytest.mark.parametrize(("python", "wanted"), [("3.11", True), ("3.12", True), ("3.13", False), ("3.14", False)])
def test_aim_is_installed_where_it_has_wheels(python: str, wanted: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = map(Requirement, project["dependencies"])
    found = {one.name for one in needed if one.marker is None or one.marker.evaluate({"python_version": python})}
    assert ("aim" in found) == wanted and {"ray", "torch", "transformers"} <= found
