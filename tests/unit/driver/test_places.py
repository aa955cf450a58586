"""Folders that can't be written are refused by the setting that names them, and nothing is left in those that can."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.run_folders import check_places
from hypha_ray.errors import ConfigError


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
