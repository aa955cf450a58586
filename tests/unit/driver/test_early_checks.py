"""Refusals before Ray begins to start: packages and members that are missing, folders that can't be written."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.preflight.checks import check_early, check_plugins
from hypha_ray.driver.run_folders import check_places, require_free_mirror
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.families import CODECS
from hypha_ray.kernels import compiled
from hypha_ray.store.directory import RunDirectory

MISSING = {"bitsandbytes", "wandb", "mlflow", "tensorboard"}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"inner_optimizer": {"name": "adamw8bit"}}, "error[OPT007]: inner_optimizer.name = 'adamw8bit' needs"),
        ({"inner_optimizer": {"name": "adagradd"}}, "Fix: write adagrad"),
        ({"telemetry": {"sinks": ["wandb"]}}, "error[CFG022]: telemetry.sinks has wandb, which isn't installed"),
        ({"telemetry": {"sinks": ["console", "mlflow"]}}, "error[CFG022]: telemetry.sinks has mlflow"),
        (
            {"model": {"repository": ".", "quantization": "nf4", "lora": {"rank": 4}}},
            "model.quantization needs bitsandbytes",
        ),
    ],
    ids=["eight bits", "optimizer", "wandb", "mlflow", "quantization"],
)
def test_missing_package_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any], words: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in MISSING else find_spec(name))
    with pytest.raises(HyphaError) as caught:
        check_early(Job.model_validate(tables), None, resume=False)
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["codec", "downward_codec"])
def test_codec_whose_loops_cannot_be_compiled_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    job = Job.model_validate({"sync": {key: "visible"}})
    check_plugins(job)
    monkeypatch.setitem(sys.modules, "hypha_ray.kernels.compiled_patches", None)
    compiled.cache_clear()
    try:
        with pytest.raises(ConfigError, match="COD002"):
            check_plugins(job)
    finally:
        compiled.cache_clear()


@pytest.mark.parametrize("name", CODECS.members)
def test_codec_that_is_built_in_passes_its_trial(name: str) -> None:
    assert check_plugins(Job.model_validate({"sync": {"codec": name, "downward_codec": name}})) == []


@pytest.mark.slow
def test_usual_job_is_checked_without_ray_and_torch() -> None:
    """Ray loads variables for workers that aren't forked, so it has to be loaded after its start."""
    code = """
import sys
from hypha_ray.config import Job
from hypha_ray.driver.preflight.checks import check_early
sinks = {"sinks": ["console", "jsonl", "prometheus"]}
check_early(Job.model_validate({"telemetry": sinks}), None, False)
print(sorted({"ray", "torch"} & sys.modules.keys()))
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "[]\n"


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which everything can be used."""
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HYPHA_RAY_HOME", str(tmp_path / "runs"))


def refused(name: str, job: Job | None = None) -> None:
    with pytest.raises(ConfigError, match=rf"error\[CFG008\]: {name} ") as caught:
        check_places(job or Job())
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_folders_that_can_be_made_are_left_unmade(tmp_path: Path) -> None:
    check_places(Job())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["home"]


@pytest.mark.parametrize("name", ["HOME", "HYPHA_RAY_HOME", "RAY_TMPDIR", "TMPDIR"])
@pytest.mark.parametrize("place", ["/proc/nope", "/dev/null", "/dev/null/below", "/proc/self/nope"])
def test_variable_that_names_what_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    monkeypatch.setenv(name, place)
    refused(name)


def test_folder_of_runs_that_cannot_be_written_is_named() -> None:
    refused("run.dir", Job.model_validate({"run": {"dir": "/dev/null/runs"}}))


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/../runs", "file://{}", "local://{}"])
@pytest.mark.parametrize("table", [{}, {"run": {"dir": "runs/"}}])
def test_mirror_in_place_of_the_runs_is_refused_whose_copies_would_destroy_their_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: dict[str, Any], form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    mirror = form.format(tmp_path / "runs")
    refused("checkpoint.mirror", Job.model_validate({**table, "checkpoint": {"mirror": mirror}}))
    for other in ("mirror", "runs/mirror", f"s3:/{tmp_path}/runs"):
        check_places(Job.model_validate({**table, "checkpoint": {"mirror": other}}))


def test_new_run_whose_name_a_mirror_has_is_refused_and_told_how_to_go_on(tmp_path: Path) -> None:
    record = tmp_path / "mirror" / "texts-1" / "commits" / "round_000000.json"
    record.parent.mkdir(parents=True)

    def job(mirror: str, name: str | None = "texts-1") -> Job:
        return Job.model_validate({"run": {"name": name}, "checkpoint": {"mirror": mirror}})

    mirror = str(tmp_path / "mirror")
    require_free_mirror(job(mirror))
    record.write_text("{}")
    for url in (mirror, f"{mirror}/", f"file://{mirror}"):
        with pytest.raises(ConfigError, match=rf"RUN001.*Fix: resume file://{mirror}/texts-1, or choose another"):
            require_free_mirror(job(url))
    for other in (job(mirror, "texts-2"), job(mirror, None), job("none://host/runs"), job("/dev/null/runs"), Job()):
        require_free_mirror(other)
    RunDirectory.create(tmp_path / "runs", "texts-1", "")
    require_free_mirror(job(mirror))


def test_home_is_named_where_runs_would_lie_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPHA_RAY_HOME")
    monkeypatch.setenv("HOME", "/proc/nope")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    refused("HOME")


def test_folder_for_temporary_files_has_to_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    refused("TMPDIR")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_folder_whose_path_is_too_long_for_rays_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv(name, str(deep))
    refused(name)


def test_on_a_cluster_only_what_the_driver_uses_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("HOME", "/proc/nope")
    monkeypatch.setenv("RAY_TMPDIR", "/proc/nope")
    check_places(Job())


def test_home_need_not_be_writable_where_the_token_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nope")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    check_places(Job())
