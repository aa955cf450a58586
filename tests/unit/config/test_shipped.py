"""Job files that come with the package are found by their names, and files of the current folder before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.config.document import config_lines, first_sentence, read
from hypha_ray.config.load import load
from hypha_ray.errors import ConfigError
from hypha_ray.files import as_installed, shipped_configs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seed_of(*arguments: str) -> int:
    return load(arguments).job.run.seed


@pytest.mark.parametrize("arguments", [("@", "tiny"), ("@tiny",), ("@", "tiny.toml"), ("tiny.toml",)])
def test_shipped_file_is_found_by_its_name(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "tiny").mkdir()  # Such as the directory of a run.
    assert load(arguments).job == load(["@", str(shipped_configs()["tiny"])]).job


def test_file_of_this_folder_wins_and_one_without_the_ending_first(folder: Path) -> None:
    (folder / "tiny.toml").write_text("run.seed = 1\n")
    assert (seed_of("@", "tiny"), seed_of("@", "tiny.toml")) == (1, 1)
    (folder / "tiny").write_text("run.seed = 2\n")
    assert (seed_of("@", "tiny"), seed_of("@", "tiny.toml")) == (2, 1)


def test_own_file_is_found_without_its_ending(folder: Path) -> None:
    (folder / "job.toml").write_text("run.seed = 3\n")
    assert seed_of("@", "job") == 3


def test_name_in_a_folder_is_taken_as_it_is(folder: Path) -> None:
    (folder / "job.toml").write_text("")
    with pytest.raises(ConfigError, match=r"CFG015.*No such file"):
        read(f"{folder}/tiny")


def test_unknown_name_lists_the_shipped_files_and_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["@", "tinny"])
    assert caught.value.code == "CFG015" and caught.value.fix == "did you mean 'tiny'?"
    assert all(name in caught.value.allowed for name in shipped_configs())
    with pytest.raises(ConfigError) as caught:
        load(["@", "qqqqq.toml"])
    assert caught.value.fix == "give a TOML file after @"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# One.\n", "One"),
        ("# Two lines of\n# one: 0.5 sentences (docs/a.md). More.\n", "Two lines of one: 0.5 sentences (docs/a.md)"),
        ("[run]\n# Late.\n", ""),
        ("", ""),
    ],
)
def test_first_sentence_of_a_job_file(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


def test_every_shipped_file_says_what_it_is() -> None:
    lines = list(config_lines())
    assert len(lines) == len(shipped_configs()) > 10
    assert all(len(line.split()) > 4 for line in lines)


def test_command_of_an_installed_package_names_files_with_hyphens(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr("hypha_ray.files._INSTALLED", folder)
    assert as_installed("python jobs/grpo.py @ jobs/configs/grpo-tiny.toml") == "hypha-ray grpo @ grpo-tiny.toml"
