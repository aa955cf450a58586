"""`rounds.epochs` and `rounds.update_rounds`: a later file or flag replaces one by the other; one has not both."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.config.load import differences, from_tables, load, resolved, resolved_toml
from hypha_ray.config.schema import Job
from hypha_ray.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rounds.toml").write_text("[rounds]\nupdate_rounds = 8\nmax_batch_size = 4\n")
    Path("epochs.toml").write_text("[rounds]\nepochs = 3\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "epochs", "rounds"),
    [
        ("@ rounds.toml --rounds.epochs 5", 5, None),
        ("@ epochs.toml --rounds.update_rounds 5", None, 5),
        ("@ rounds.toml epochs.toml", 3, None),
        ("@ epochs.toml rounds.toml", None, 8),
        ("@ rounds.toml epochs.toml --rounds.epochs 4", 4, None),
        ("@ epochs.toml rounds.toml --rounds.epochs 4", 4, None),
        ("@ rounds.toml --rounds.epochs none", None, 8),
        ("@ rounds.toml --rounds.max_batch_size 2", None, 8),
        ("--rounds.epochs 2", 2, None),
    ],
)
def test_later_place_replaces_the_length_of_an_earlier_one(
    folder: Path, words: str, epochs: int | None, rounds: int | None
) -> None:
    job = load(words.split()).job
    assert job.rounds.epochs == epochs
    assert rounds is None or job.rounds.update_rounds == rounds
    assert job.rounds.counted == (epochs is None)


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("--rounds.epochs 3 --rounds.update_rounds 8", "--rounds.epochs and --rounds.update_rounds exclude each other"),
        ("--rounds.update_rounds 8 --rounds.epochs 3", "--rounds.epochs and --rounds.update_rounds exclude each other"),
        ("@ both.toml", "both.toml:3: rounds.epochs and both.toml:2: rounds.update_rounds exclude each other"),
        ("@ both.toml --run.seed 3", "both.toml:3: rounds.epochs and both.toml:2: rounds.update_rounds exclude"),
    ],
)
def test_both_lengths_in_one_place_are_refused(folder: Path, words: str, places: str) -> None:
    Path("both.toml").write_text("[rounds]\nupdate_rounds = 8\nepochs = 3\n")
    with pytest.raises(ConfigError, match="leave one of them out") as refused:
        load(words.split())
    assert refused.value.code == "CFG011"
    assert places in str(refused.value)


def test_tables_of_a_program_with_both_lengths_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        from_tables({"rounds": {"epochs": 3, "update_rounds": 8}})
    assert refused.value.code == "CFG011"


def test_resolved_job_has_one_length_also_once_the_rounds_are_known(folder: Path) -> None:
    job = load(["@", "epochs.toml"]).job
    for known in (job, job.lasting(7)):
        rounds = resolved(known)["rounds"]
        assert rounds["epochs"] == 3 and "update_rounds" not in rounds
        (folder / "resolved.toml").write_text(resolved_toml(known))
        assert load(["@", "resolved.toml"]).job.rounds == Job.model_validate({"rounds": rounds}).rounds
    assert job.lasting(7).rounds.counted and not differences(job.lasting(7), job)


def test_run_goes_on_with_the_other_length(folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(resolved_toml(load(["@", "rounds.toml"]).job))
    resumed = load(["--resume", "run", "--rounds.epochs", "2"], lambda *_: run).job
    assert (resumed.rounds.epochs, resumed.rounds.max_batch_size) == (2, 4)
    changed = {str(change) for change in differences(resumed, load(["@", "rounds.toml"]).job)}
    assert "rounds.epochs is 2 here and not set in the run" in changed


def test_warm_up_is_held_against_rounds_only_if_they_are_given(folder: Path) -> None:
    assert load(["@", "epochs.toml", "--rounds.warmup_rounds", "200"]).job.rounds.warmup_rounds == 200
    with pytest.raises(ConfigError, match=r"warmup_rounds is more than .*update_rounds"):
        load(["@", "rounds.toml", "--rounds.warmup_rounds", "200"])
