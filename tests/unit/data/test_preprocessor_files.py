"""Files of a tokenizer or a preprocessor, as they come from other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.data.storage import preprocessor_files, write_files


@pytest.mark.parametrize("name", ["../outside", "inner/../../outside", "{root}/outside", "../folder-beside/outside"])
def test_file_whose_name_leads_out_of_the_folder_is_passed_over(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (tmp_path / "folder-beside").mkdir()
    write_files({name.format(root=tmp_path): b"bad", "inner/vocab.txt": b"a", "tokenizer.json": b"{}"}, folder)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"folder/inner/vocab.txt", "folder/tokenizer.json"}


def test_link_out_of_the_folder_is_not_written_through(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "inner").symlink_to(outside)
    write_files({"inner/vocab.txt": b"bad"}, folder)
    assert not [*outside.iterdir()]


def test_files_that_are_written_are_those_that_were_read(tmp_path: Path) -> None:
    given, copy = tmp_path / "given", tmp_path / "copy"
    write_files({"tokenizer.json": b"{}", "tokenizer_config.json": b"{ }"}, given)
    write_files(preprocessor_files(given), copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{ }",
    }
