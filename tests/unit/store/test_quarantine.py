"""The list of slices that a run goes on without."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.errors import CheckpointError
from hypha_ray.store.directory import QUARANTINE, quarantine, quarantined


def test_slices_are_listed_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    assert quarantined(tmp_path) == {}
    quarantine(tmp_path, 17, "cut off")
    quarantine(tmp_path, 3, "flipped")
    assert quarantined(tmp_path) == {3: "flipped", 17: "cut off"}
    assert [path.name for path in tmp_path.iterdir()] == [QUARANTINE]


def test_first_reason_counts(tmp_path: Path) -> None:
    quarantine(tmp_path, 17, "cut off")
    before = (tmp_path / QUARANTINE).read_bytes()
    quarantine(tmp_path, 17, "flipped")
    assert (tmp_path / QUARANTINE).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"slices": [], "checksum": ""}', b"\xff"])
def test_damaged_list_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / QUARANTINE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"STORE014.*quarantine.json is damaged.*remove it"):
        quarantined(tmp_path)


def test_list_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    quarantine(tmp_path, 17, "cut off")
    content = bytearray((tmp_path / QUARANTINE).read_bytes())
    content[content.index(b"17")] ^= 1
    (tmp_path / QUARANTINE).write_bytes(content)
    with pytest.raises(CheckpointError, match="STORE014"):
        quarantined(tmp_path)
