"""A file for a result is refused before the work if it can't be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.config.cli.output import require_writable, write_result
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
