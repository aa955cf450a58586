"""A file for a result is refused before the work if it can't be written."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hypha_ray.config import entry_point
from hypha_ray.config.entry_point import STDOUT, require_writable, write_result
from hypha_ray.config.options import parse_options
from hypha_ray.errors import ConfigError


def test_places_that_cannot_be_written_are_refused_before_and_after(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "figures.json"):
        for refuse in (require_writable, lambda option, file: write_result(option, file, "{}")):
            with pytest.raises(ConfigError, match=r"CFG008.*--json can't be used.*a file that can be written"):
                refuse("--json", place)


def test_files_that_can_be_written_are_taken_and_left_as_they_are(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    for file in (None, old, tmp_path / "new.json"):
        require_writable("--json", file)
    assert old.read_text() == "{}" and not (tmp_path / "new.json").exists()


@dataclass(frozen=True)
class Listing:
    """List something."""

    json: Path | None = None
    """file for the list"""
    out: Path | None = None
    """file for the page"""


@pytest.mark.parametrize("option", ["json", "out"])
def test_result_for_standard_output_is_alone_there(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # Both are as before in the end.
    monkeypatch.setattr(entry_point, "_results", [])
    options = parse_options(Listing, "A job.", [f"--{option}", "-"])
    assert getattr(options, option) == STDOUT
    print("for people")
    require_writable(f"--{option}", STDOUT)
    write_result(f"--{option}", STDOUT, "[1]\n")
    captured = capsys.readouterr()
    assert captured.out == "[1]\n" and captured.err == "for people\n"


def test_standard_output_takes_one_result() -> None:
    with pytest.raises(ConfigError, match=r"CFG011.*--json and --out exclude each other as standard output"):
        parse_options(Listing, "A job.", ["--json", "-", "--out", "-"])
