"""Arrays of tables in job files and flags, and the groups of workers that they give."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import differences, load, resolved_toml
from hypha_ray.errors import ConfigError

Write = Callable[[str], str]
GROUPS = """\
[resources]
min_workers = 2

[[workers]]
count = 2
cpu = 0.5

[[workers]]
kind = "bridged"
command = "python x.py"
memory_gb = 1
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> str:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return written


def groups(job: Job) -> list[tuple[str, int, float, float, str | None]]:
    return [(group.kind, group.count, group.cpu, group.memory_gb, group.command) for group in job.worker_groups]


def test_groups_of_a_file_are_numbered_one_after_the_other(write: Write) -> None:
    job = load(["@", write(GROUPS)]).job
    assert groups(job) == [("train", 2, 0.5, 0.0, None), ("bridged", 1, 1.0, 1.0, "python x.py")]
    assert job.num_workers == 3
    assert [job.group_of(number).bridged for number in range(3)] == [False, False, True]
    with pytest.raises(IndexError):
        job.group_of(3)


def test_file_without_groups_has_those_that_its_keys_mean() -> None:
    flags = ["--resources.num_workers", "4", "--resources.worker.cpu", "0.5", "--resources.min_memory_mb", "2000"]
    job = load([*flags, "--bridge.commands", "['', 'node x.mjs']"]).job
    assert groups(job) == [
        ("train", 2, 0.5, 2.0, None),
        ("bridged", 1, 0.5, 2.0, ""),
        ("bridged", 1, 0.5, 2.0, "node x.mjs"),
    ]
    assert [job.group_of(number).dials_in for number in range(4)] == [False, False, True, False]
    assert "workers" not in tomllib.loads(resolved_toml(job))


def test_file_whose_trainers_are_all_outside_has_no_group_of_ours() -> None:
    assert groups(load(["--bridge.commands", "['a', 'b']"]).job) == [
        ("bridged", 1, 1.0, 0.0, "a"),
        ("bridged", 1, 1.0, 0.0, "b"),
    ]


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        (["--workers.0.count", "5"], [5, 1]),
        (["--workers.1", "{count = 3}"], [2, 3]),
        (["--workers.2.count=7"], [2, 1, 7]),
        (["--workers", "[{count = 4}]"], [4]),
        (["--workers", "[{count = 4}]", "--workers.1.count", "2"], [4, 2]),
        (["--workers", "[]", "--resources.num_workers", "6"], [6]),
    ],
)
def test_flag_changes_one_group_or_replaces_all(flags: list[str], counts: list[int], write: Write) -> None:
    job = load(["@", write(GROUPS), *flags]).job
    assert [group.count for group in job.worker_groups] == counts


def test_flag_leaves_the_other_keys_of_a_group(write: Write) -> None:
    job = load(["@", write(GROUPS), "--workers.1.count", "3"]).job
    assert groups(job)[1] == ("bridged", 3, 1.0, 1.0, "python x.py")


def test_later_file_with_groups_replaces_those_before(write: Write) -> None:
    job = load(["@", write(GROUPS), "@", write("[resources]\nmin_workers = 1\n[[workers]]\ngpu = 1\n")]).job
    (group,) = job.worker_groups
    assert (group.count, group.cpu, group.gpu) == (1, 1.0, 1.0)


def test_groups_in_the_guides_table_are_the_same(write: Write) -> None:
    guide = GROUPS.replace("[[workers]]", "[[scheduler.job.workers]]").replace("[res", "[scheduler.job.res")
    assert load(["@", write(guide)]).job == load(["@", write(GROUPS)]).job


def test_resolved_job_file_has_groups_and_not_the_keys_that_they_replace(write: Write) -> None:
    job = load(["@", write(GROUPS)]).job
    text = resolved_toml(job)
    assert [group["count"] for group in tomllib.loads(text)["workers"]] == [2, 1]
    for name in ("num_workers", "[resources.worker]", "commands"):
        assert name not in text
    assert load(["@", write(text)]).job == job


def test_differences_name_the_key_of_a_group(write: Write) -> None:
    here = load(["@", write(GROUPS), "--workers.1.count", "2", "--workers.2.gpu", "1"]).job
    shown = [str(difference) for difference in differences(here, load(["@", write(GROUPS)]).job)]
    assert "workers.1.count is 2 here and 1 in the run" in shown
    assert "workers.2.gpu is 1.0 here and not set in the run" in shown


IN_FILES = [
    ("[[workers]]\ncount = 100_000\n[[workers]]", "CFG003", "has too many workers — got 100001, allowed up to 100000"),
    ("[[workers]]\n[[workers]]\ncuont = 2", "CFG001", "job.toml:3: unknown key workers.1.cuont. Fix: did you mean `wo"),
    ("[[worker]]\ncount = 2", "CFG002", "job.toml:1: worker has the wrong type"),
    ("[[workres]]", "CFG001", "did you mean `workers`?"),
    (
        "[workers]\ncount = 2",
        "CFG002",
        "workers has the wrong type — got a table, allowed a list of tables. Fix",
    ),
    ("workers = 3", "CFG002", "job.toml:1: workers has the wrong type — got 3, allowed a list of tables"),
    ("workers = [{count = 1}, 3]", "CFG002", "job.toml:1: workers.1 has the wrong type — got 3, allowed a table"),
    (
        "[[workers]]\n[[workers]]\ncount = 0",
        "CFG003",
        "job.toml:3: workers.1.count is out of range — got 0",
    ),
    ("[[workers]]\n\n[[workers]]\nkind = 'tarin'", "CFG003", "job.toml:4: workers.1.kind is out of range — got 'tarin"),
    ("[[workers]]\ncpu = 'x'", "CFG002", "job.toml:2: workers.0.cpu has the wrong type — got 'x', allowed number ≥ 0"),
    ("[[workers]]\ncommand = 'x'", "CFG011", "job.toml:2: workers.0.command and workers.0.kind"),
    ("[resources]\nnum_workers = 2\n[[workers]]", "CFG011", "job.toml:2: resources.num_workers and "),
    ("[[workers]]\n[resources.worker]\ncpu = 2", "CFG011", "job.toml:3: resources.worker.cpu and "),
    ("[[workers]]\n[bridge]\ncommands = ['x']", "CFG011", "bridge.commands and "),
    ("[[workers]]\n[resources]\nmin_gpus = 1", "CFG011", "job.toml:1: workers exclude each other. Fix: give number"),
    (
        "[[workers]]\ncount = 2\n[resources]\nmin_workers = 3",
        "CFG003",
        "job.toml:4: resources.min_workers is more",
    ),
    (
        "[[workers]]\n[sync]\nquorum = 2",
        "CFG003",
        "job.toml:1: workers — got 2, allowed up to 1",
    ),
    (
        "[[workers]]\nkind = 'bridged'\n[run]\nmode = 'replay'",
        "CFG011",
        "job.toml:2: workers.0.kind and run.mode",
    ),
    ("[[workers]]\n[[workers]]\nkind = 'bridged'\n[sync]\nmixing = 0.5", "CFG011", "job.toml:3: workers.1.kind excl"),
    ("[[workers]]\ncount = 1\ncount = 2", "CFG005", "workers.0.count is declared twice, on lines 2 and 3"),
]

IN_FLAGS = [
    (["--workers.0.cuont", "2"], "CFG001", "unknown flag --workers.0.cuont. Fix: did you mean `workers.0.count`?"),
    (["--workers.count", "2"], "CFG001", "did you mean `workers.N.count`?"),
    (["--workers.00.count", "2"], "CFG001", "unknown flag --workers.00.count"),
    (["--workers.*.count", "2"], "CFG002", "allowed a list of tables"),
    (
        ["--workers.1.count", "2"],
        "CFG003",
        "--workers.1: the number leaves a gap in the array — got 1",
    ),
    (["--workers", "3"], "CFG002", "--workers has the wrong type — got 3, allowed a list of tables"),
    (["--workers.0"], "CFG015", "--workers.0 needs a value"),
    (["--workers.0.gpu", "1", "--resources.worker.gpu", "1"], "CFG011", "--resources.worker.gpu and --workers.0 exclu"),
]


@pytest.mark.parametrize(("text", "code", "part"), IN_FILES)
def test_wrong_group_in_a_file_is_one_line_with_its_place(text: str, code: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(["@", str(tmp_path / "job.toml")])
    assert (caught.value.code, part in str(caught.value)) == (code, True), str(caught.value)


@pytest.mark.parametrize(("flags", "code", "part"), IN_FLAGS)
def test_wrong_group_in_a_flag_is_one_line_with_the_flag(flags: list[str], code: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert (caught.value.code, part in str(caught.value)) == (code, True), str(caught.value)


def test_settings_of_trainers_have_no_effect_beside_groups_without_one(write: Write) -> None:
    notes = load(["@", write("[[workers]]\n"), "--bridge.listen", "0.0.0.0:4000"]).notes
    assert notes == ("CFG103: --bridge.listen has no effect beside the [[workers]] of the job",)
    assert load(["--workers.0.kind", "bridged", "--bridge.listen", "0.0.0.0:4000"]).notes == ()
