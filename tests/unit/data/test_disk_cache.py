"""Copies on a machine's disk: the cache of slices with its limit, and files of a tokenizer or a preprocessor."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.data import storage
from hypha_ray.data.storage import DiskCache, preprocessor_files, write_files


def content(number: int, size: int = 1000) -> tuple[str, bytes]:
    data = bytes([number]) * size
    return hashlib.sha256(data).hexdigest(), data


def fill(cache: DiskCache, *numbers: int) -> None:
    for number in numbers:
        assert cache.write(*content(number)) is None


def kept(cache: DiskCache, *numbers: int) -> list[int]:
    return [number for number in numbers if cache.read(content(number)[0]) is not None]


def test_file_that_was_written_is_read_and_is_its_owners_alone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "home" / "cache", 10_000)
    sha256, data = content(1)
    assert cache.read(sha256) is None
    assert cache.write(sha256, data) is None and cache.read(sha256) == data
    assert DiskCache(tmp_path / "home" / "cache", 10_000).read(sha256) == data
    path = tmp_path / "home" / "cache" / sha256[:2] / sha256
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, path.parents[1])] == [0o600, 0o700, 0o700]


def test_file_that_was_used_longest_ago_is_removed_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 3000)
    for age, number in enumerate((1, 2, 3)):
        fill(cache, number)
        path = tmp_path / content(number)[0][:2] / content(number)[0]
        os.utime(path, ns=(age * 10**9, age * 10**9))
    assert kept(cache, 1) == [1]  # From here on, 2 was used longest ago.
    fill(cache, 4)
    assert kept(cache, 1, 2, 3, 4) == [1, 3, 4]


def test_writers_at_the_same_time_keep_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one writes while the first one, which has made room, hasn't written yet."""
    first, second = (DiskCache(tmp_path, 2000) for _ in range(2))
    fill(first, 1)
    shrink = first._shrink

    def shrink_and_be_slow(bytes: int) -> None:
        shrink(bytes)
        monkeypatch.undo()
        fill(second, 3)

    monkeypatch.setattr(first, "_shrink", shrink_and_be_slow)
    fill(first, 2)
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) == 2000


def test_file_larger_than_the_limit_is_not_kept_and_removes_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 2500)
    fill(cache, 1, 2)
    problem = cache.write(*content(3, 2501))
    assert problem == "a file of 2,501 bytes is larger than the cache's limit of 2,500"
    assert kept(cache, 1, 2, 3) == [1, 2]


def test_files_of_others_are_never_removed(tmp_path: Path) -> None:
    sha256 = content(9)[0]
    target = tmp_path / "elsewhere"
    target.write_bytes(b"x" * 5000)
    cache_folder = tmp_path / "cache"
    others = [cache_folder / "notes.txt", cache_folder / "ab" / "notes.txt", cache_folder / "00" / sha256]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 5000)
    link = cache_folder / sha256[:2] / sha256
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    cache = DiskCache(cache_folder, 2000)
    fill(cache, 1, 2, 3)
    assert all(path.read_bytes() == b"x" * 5000 for path in (*others, target)) and link.is_symlink()
    assert len(kept(cache, 1, 2, 3)) == 2


def test_leftover_of_a_killed_writer_counts_and_is_removed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 2000)
    fill(cache, 1)
    sha256 = content(7)[0]
    part = tmp_path / sha256[:2] / f"{sha256}.{'0' * 32}.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(b"x" * 1000)
    os.utime(part, ns=(0, 0))
    fill(cache, 2)
    assert not part.exists() and kept(cache, 1, 2) == [1, 2]


def test_folder_that_cannot_be_written_is_a_reason_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file")
    problem = DiskCache(tmp_path / "cache", 5000).write(*content(1))
    assert problem is not None and "can't be written" in problem


def test_default_limit_is_a_share_of_the_free_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    limit = DiskCache(tmp_path / "not" / "yet").limit_bytes
    assert abs(limit - min(50e9, free / 5)) < 0.1 * free


def test_folder_that_cant_exist_is_a_reason_to_keep_nothing_and_no_error() -> None:
    reason = DiskCache(Path("/" + "x" * 300)).write(*content(1))
    assert reason is not None and "can't be written: File name too long" in reason


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of times that each folder was listed."""
    counted, scandir = Counter[str](), os.scandir

    def counting(folder: Path) -> Any:
        counted[Path(folder).name] += 1
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", counting)
    return counted


def settle(folder: Path) -> None:
    """Set the times of all subfolders back, as if nothing had come or gone for a while."""
    for subfolder in folder.iterdir():
        os.utime(subfolder, ns=(10**18 + 1, 10**18 + 1))


def test_write_lists_no_subfolder_that_nothing_has_come_to_or_gone_from(
    tmp_path: Path, listed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SETTLED_S", 0.0)
    cache = DiskCache(tmp_path, 100_000)
    fill(cache, *range(60))
    settle(tmp_path)
    fill(cache, 60)  # Each subfolder is seen at its new time,
    fill(cache, 60)  # and listed once more, for it may have changed again within one step of the clock.
    listed.clear()
    fill(cache, 61, 62, 63)
    touched = {content(number)[0][:2] for number in (60, 61, 62, 63)}
    assert set(listed) - {tmp_path.name} <= touched


def test_files_that_another_process_has_written_or_removed_count(tmp_path: Path) -> None:
    first, second = DiskCache(tmp_path, 4000), DiskCache(tmp_path, 100_000)
    fill(first, 1, 2)
    settle(tmp_path)
    fill(first, 3)
    fill(second, 4, 5, 6)
    fill(first, 7)
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) == 4000
    second.remove(content(7)[0])
    fill(first, 8)
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) == 4000


def test_file_that_another_process_has_used_since_it_was_listed_stays(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 4000)
    fill(cache, 1, 2, 3)
    for age, number in enumerate((1, 2, 3)):
        os.utime(tmp_path / content(number)[0][:2] / content(number)[0], ns=(age * 10**9, age * 10**9))
    settle(tmp_path)
    fill(cache, 4)
    assert kept(DiskCache(tmp_path, 4000), 1) == [1]
    fill(cache, 5)
    assert kept(cache, 1, 2, 3, 4, 5) == [1, 3, 4, 5]


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
