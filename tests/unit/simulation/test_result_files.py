"""Files of `simulate` that can't be written are refused before anything is simulated, in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.driver.what_if import advise
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.result import write_rows
from jobs.simulate import Simulate, check


@pytest.mark.parametrize("mode", [{"scenario": "laptop"}, {"from_": "RUN"}, {"rivals": True}])
def test_json_that_cannot_be_written_is_refused_at_first(tmp_path: Path, mode: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"CFG008.*--json can't be used"):
        check(Simulate(**mode, json=tmp_path / "nowhere" / "results.json"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["file", "file/plots", "x" * 300])
def test_plots_without_a_folder_are_refused_at_first(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"CFG015.*the plots can't be written to .*name a folder for --plot"):
        check(Simulate(scenario="laptop", plot=tmp_path / name))


def test_folder_for_plots_is_made_at_first(tmp_path: Path) -> None:
    check(Simulate(scenario="laptop", plot=tmp_path / "new" / "plots"))
    assert (tmp_path / "new" / "plots").is_dir()


@pytest.mark.parametrize("option", ["--json", "--out"])
def test_files_of_the_advice_that_cannot_be_written_are_refused_at_first(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"CFG008.*{option} can't be used"):
        advise(["--advise", "@", "tiny", "--link", "20mbit", option, str(tmp_path)], None)


def test_file_that_cannot_be_written_in_the_end_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CFG008"):
        write_rows([], tmp_path)
