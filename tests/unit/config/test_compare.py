"""What two jobs differ in, in the words that a user is shown, and which differences make another training."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hypha_ray.config import Job
from hypha_ray.config.load import differences, load, resolved_toml

BASE = [
    *("--model.config.model_type", "llama"),
    *("--model.config.hidden_size", "32"),
    *("--dataset.path", "data/texts"),
    *("--run.name", "one"),
]


def job(*flags: str) -> Job:
    return load([*BASE, *flags]).job


def shown(here: Job, there: Job) -> list[str]:
    return [str(difference) for difference in differences(here, there)]


def test_differences_of_a_job_and_its_own_file_are_none(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    mine = job("--inner_optimizer.clip_norm", "none", "--model.config.nested.deep", "1")
    file.write_text(resolved_toml(mine))
    assert tomllib.loads(file.read_text())["inner_optimizer"]["clip_norm"] == "none"
    assert differences(mine, load(["@", str(file)]).job) == ()


@pytest.mark.parametrize(
    ("flags", "text", "forks"),
    [
        (("--model.config.hidden_size", "64"), "model.config.hidden_size is 64 here and 32 in the run", True),
        (("--model.config.new", "1"), "model.config.new is 1 here and not set in the run", True),
        (("--model.revision", "v2"), "model.revision is 'v2' here and not set in the run", True),
        (("--preprocessor.repository", "a/b"), "preprocessor.repository is 'a/b' here and not set in the run", True),
        (("--dataset.path", "else"), "dataset.path is 'else' here and 'data/texts' in the run", True),
        (("--run.seed", "1"), "run.seed is 1 here and 0 in the run", True),
        (("--run.mode", "replay"), "run.mode is 'replay' here and 'elastic' in the run", True),
        (("--sync.fragments", "2"), "sync.fragments is 2 here and 1 in the run", True),
        (("--inner_optimizer.name", "sgd"), "inner_optimizer.name is 'sgd' here and 'adamw' in the run", True),
        (("--rounds.update_rounds", "9"), "rounds.update_rounds is 9 here and 100 in the run", False),
        (("--inner_optimizer.learning_rate", "0.5"), "inner_optimizer.learning_rate is 0.5 here and 0.001", False),
        (("--inner_optimizer.clip_norm", "none"), "inner_optimizer.clip_norm is 'none' here and 1.0", False),
        (("--resources.worker.gpu", "1"), "resources.worker.gpu is 1.0 here and 0.0 in the run", False),
        (("--dataset.shards", "2"), "dataset.shards is 2 here and 1 in the run", False),
        (("--telemetry.sinks", "jsonl"), "telemetry.sinks is ['jsonl'] here and ['console', ", False),
    ],
)
def test_difference_names_the_key_and_both_values(flags: tuple[str, ...], text: str, forks: bool) -> None:
    (difference,) = differences(job(*flags), job())
    assert str(difference).startswith(text)
    assert difference.forks is forks


def test_key_that_the_run_has_and_this_job_does_not_is_a_difference() -> None:
    assert shown(job(), job("--model.config.new", "1")) == ["model.config.new is not set here and 1 in the run"]


def test_name_place_and_tests_of_a_run_are_no_differences() -> None:
    flags = ("--run.name", "two", "--run.dir", "elsewhere", "--testing.slowdown", "2,3")
    assert differences(job(*flags), job()) == ()


def test_secrets_are_no_differences(tmp_path: Path) -> None:
    file = tmp_path / "secret.toml"
    file.write_text('[model]\ntoken = "hf_one"\n')
    assert differences(load([*BASE, "@", str(file)]).job, job()) == ()
    file.write_text('[model]\ntoken = "hf_two"\n[rounds]\nmax_batch_size = 3\n')
    assert shown(load([*BASE, "@", str(file)]).job, job()) == ["rounds.max_batch_size is 3 here and 32 in the run"]


def test_labels_of_a_run_make_no_other_job() -> None:
    assert differences(job("--run.notes", "again", "--run.tags", "a,b"), job()) == ()
