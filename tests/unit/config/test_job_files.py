"""Job files that the project ships or shows: found by name, and free of anything that should be otherwise."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypha_ray.config.document import config_lines, first_sentence, read
from hypha_ray.config.load import load
from hypha_ray.driver.preflight.checks import advice, check_job
from hypha_ray.driver.preflight.run_costs import machine_lines
from hypha_ray.errors import ConfigError
from hypha_ray.files import as_installed, shipped_configs
from hypha_ray.market.requirements import NodeResources

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "jobs" / "configs").glob("*.toml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> Iterator[tuple[str, str]]:
    """Every TOML block of the documentation that is for a job file, and where it stands; a scenario has machines."""
    for page in PAGES:
        found = re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for number, text in enumerate(found):
            if "[[machines]]" not in text:
                yield f"{page.stem}-{number}", text


def commands(config: Path) -> list[list[str]]:
    """Arguments of the commands in the comment at the head of a job file."""
    head = config.read_text(encoding="utf-8").partition("\n[")[0].replace("\\\n#", " ")
    lines = re.findall(r"python jobs/(?:diloco|sync)\.py (.+)", head)
    return [[str(ROOT / word) if word.startswith("jobs/") else word for word in shlex.split(line)] for line in lines]


def said(arguments: list[str]) -> list[str]:
    """Notes and advice that a start would print."""
    loaded = load(arguments)
    return [*loaded.notes, *advice(loaded.job)]


@pytest.mark.parametrize(("text"), [pytest.param(text, id=name) for name, text in blocks()])
def test_job_file_in_the_docs_raises_no_note_and_no_advice(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    assert said(["@", str(tmp_path / "job.toml")]) == []


def test_readme_and_quickstart_show_job_files() -> None:
    assert {name for name, _ in blocks()} >= {"README-0", "quickstart-0"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_job_file_that_is_shipped_raises_no_note_and_no_advice_in_the_command_that_it_names(config: Path) -> None:
    named = commands(config) or [["@", str(config)]]
    assert all(str(config) in arguments for arguments in named)
    assert [said(arguments) for arguments in named] == [[]] * len(named)


def nodes(kinds: dict[str, int], gpus: int = 1) -> list[NodeResources]:
    """A cluster with so many machines of each kind of GPU."""
    has = {"CPU": 16.0, "GPU": float(gpus), "memory": 64e9}
    names = (f"{kind}-{number}" for kind, count in kinds.items() for number in range(count))
    return [NodeResources(name, has, has, {"gpu_type": name.partition("-")[0]}) for name in names]


CLUSTERS: dict[str, tuple[list[NodeResources], list[str]]] = {
    "chat-lora": (nodes({"l4": 4}), ["resources: 4 of 4 workers fit; nodes: 4"]),
    "chat-full": (nodes({"a100": 2}, gpus=8), ["resources: 2 of 2 workers fit; nodes: 2"]),
    "pretrain": (nodes({"l4": 8}), ["resources: 8 of 8 workers fit; nodes: 8"]),
    "images": (nodes({"t4": 2}), ["resources: 2 of 2 workers fit; nodes: 2"]),
    "labels": (nodes({"t4": 2}), ["resources: 2 of 2 workers fit; nodes: 2"]),
    "regions": (
        nodes({"h100": 4, "a100": 4, "l4": 7}),
        [
            "workers 0 to 3, each with 1 CPU, 1 GPU, gpu_type h100: 4 of 4 fit",
            "workers 4 to 7, each with 1 CPU, 1 GPU, gpu_type a100: 4 of 4 fit",
            "workers 8 to 15, each with 1 CPU, 1 GPU, gpu_type l4: 7 of 8 fit",
            "resources: 15 of 16 workers fit; nodes: 15",
        ],
    ),
}
"""Machines that job files are for, and what a dry run says of them."""


@pytest.mark.parametrize("name", CLUSTERS)
def test_job_file_that_is_shipped_fits_the_cluster_that_it_describes(name: str) -> None:
    job = load(["@", str(ROOT / "jobs" / "configs" / f"{name}.toml")]).job
    check_job(job)
    there, lines = CLUSTERS[name]
    assert list(machine_lines(job, there, "head")) == lines


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
