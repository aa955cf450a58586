"""Advice from a command line: the report, the proposed settings, and errors that name what to mend."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hypha_ray.config.load import from_tables, load
from hypha_ray.driver.what_if import advise, shape_of_model
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.model.build import build_model
from hypha_ray.simulation.result import HEADLINE
from tests.support.prose import ROOT
from tests.support.recorded_run import write_run

TINY = str(ROOT / "jobs/configs/tiny.toml")
GPT = {"model_type": "gpt2", "vocab_size": 100, "n_positions": 16, "n_embd": 8, "n_layer": 7, "n_head": 2}


def test_shape_counts_what_is_trained_and_its_layers() -> None:
    job = from_tables({"model": {"config": GPT}})
    shape = shape_of_model(job)
    model = build_model(job.model, 0)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layers == 7
    assert sorted(shape.parts) == [2, 4]
    for fragments, sizes in shape.parts.items():
        assert len(sizes) == fragments
        assert sum(sizes) == shape.parameters


def test_advice_on_standard_output_is_a_job_file_that_begins_with_the_headline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    advise(["--advise", "@", TINY, "--link", "20mbit", "--latency", "20ms", "--json", str(figures)], None)
    output = capsys.readouterr().out
    assert output.splitlines()[0] == f"# {HEADLINE}"
    assert "for other speeds" in output
    overlay = tmp_path / "overlay.toml"
    overlay.write_text(output)
    job = load(["@", TINY, "@", str(overlay)]).job
    tables = tomllib.loads(output)
    assert job.sync.codec == tables["sync"]["codec"] != "fp32"
    rows: list[dict[str, Any]] = json.loads(figures.read_text())
    assert [row["name"] for row in rows] == ["proposed", "the job as it is"]
    needed = {"settings", "rounds", "time_s", "bytes_up", "bytes_down", "utilisation", "idle_fraction", "goodput"}
    for row in rows:
        assert needed | {"cost", "events", "waiting", "estimate"} <= set(row)
    keys = {proposal["key"] for proposal in rows[0]["advice"]}
    assert keys == {f"{table}.{name}" for table, names in tables.items() for name in names}
    assert all(proposal["reason"] for proposal in rows[0]["advice"])


def test_advice_with_a_file_prints_the_report_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "overlay.toml"
    advise(["--advise", "@", TINY, "--link", "10gbit", "--batch-s", "0.05", "--out", str(out)], None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == HEADLINE
    assert lines[-1] == f"proposed settings: {out}"
    assert "for other speeds" not in "\n".join(lines)
    assert load(["@", TINY, "@", str(out)]).job.sync.codec == "fp32"


def test_estimated_and_simulated_waiting_agree(tmp_path: Path) -> None:
    """The simulation has no coding times; a tiny model's are nothing beside a slow link's."""
    figures = tmp_path / "figures.json"
    for link in ("2mbit", "50mbit/10mbit"):
        command = ["--advise", "@", TINY, "--link", link, "--latency", "20ms", "--batch-s", "0.1"]
        advise([*command, "--json", str(figures), "--out", str(tmp_path / "overlay.toml")], None)
        for row in json.loads(figures.read_text()):
            assert row["waiting"] == pytest.approx(row["estimate"]["waiting"], abs=0.03)


def test_flag_of_the_job_that_wins_over_the_advice_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "overlay.toml")
    advise(["--advise", "@", TINY, "--link", "20mbit", "--sync.codec", "bf16", "--batch-s", "0.1", "--out", out], None)
    assert "--sync.codec 'bf16' wins over the proposed" in capsys.readouterr().err.replace('"', "'")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], "CFG012", "--link is missing"),
        (["--link", "fast"], "CFG015", "100mbit"),
        (["--link", "1gbit", "--latency", "20"], "CFG015", "20ms"),
        (["--link", "1gbit", "--latensy", "20ms"], "CFG001", "did you mean --latency?"),
        (["--link", "1gbit", "--sync.codecc", "int4"], "CFG001", "sync.codec"),
        (["--link", "1gbit", "--batch-s", "1", "2", "3"], "CFG003", "1 or 2"),
        (["--link", "1gbit", "--batch-s", "0"], "CFG003", "--batch-s"),
        (["--link", "1gbit", "--overhead", "2"], "CFG003", "--overhead"),
        (["--link", "1gbit", "--parameters", "0.5"], "CFG003", "--parameters"),
        (["--link", "1gbit", "--head-link", "x"], "CFG015", "--head-link"),
        (["--link", "1gbit", "--sync.strategy", "sync"], "CFG011", "--sync.strategy diloco"),
        (["--link", "1gbit", "--model.config", "none"], "CFG012", "--parameters"),
    ],
)
def test_wrong_command_is_one_error_that_says_what_is_right(arguments: list[str], code: str, text: str) -> None:
    with pytest.raises(HyphaError) as caught:
        advise(["--advise", "@", TINY, *arguments], None)
    assert isinstance(caught.value, ConfigError)
    assert caught.value.code == code
    assert text in str(caught.value)


def test_size_may_be_given_in_place_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--advise", "--link", "20mbit", "--head-link", "10gbit", "--parameters", "1.1e9", "--batch-s", "1"]
    advise([*command, "--rounds.update_rounds", "10000", "--rounds.max_batch_size", "8"], None)
    tables = tomllib.loads(capsys.readouterr().out)
    assert tables["sync"]["codec"] == "int4"
    assert tables["sync"]["fragments"] == 8
    assert tables["sync"]["partition"] == "contiguous"
    assert tables["worker"]["stall_s"] > 2 * 1760  # 4.4 GB at 20 Mbit/s


@pytest.mark.parametrize("of_job", [[], ["--rounds.max_exchange_share", "0.2"]], ids=["equal rounds", "growing rounds"])
def test_advice_for_a_job_with_epochs_keeps_them(
    of_job: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    save_file({"input_ids": np.zeros((196, 8), np.int64)}, data / "slice-00000.safetensors")
    epochs = ["@", TINY, "--rounds.epochs", "50", "--dataset.path", str(data), *of_job]
    advise(["--advise", *epochs, "--link", "100kbit", "--batch-s", "0.1"], None)
    overlay = tmp_path / "overlay.toml"
    overlay.write_text(capsys.readouterr().out)
    steps = 50 * 196 // (2 * 8)
    assert f"# the run has {steps} inner steps a worker; H is held to a tenth of them" in overlay.read_text()
    rounds = load([*epochs, "@", str(overlay)]).job.rounds
    assert rounds.epochs == 50 and "update_rounds" not in rounds.model_fields_set
    assert rounds.samples_between_updates == 2 * 8 * (steps // 10)


def test_advice_for_a_job_with_epochs_of_no_dataset_asks_for_it() -> None:
    with pytest.raises(ConfigError, match=r"CFG012.*rounds\.epochs needs the size of the dataset.*dataset\.path"):
        advise(["--advise", "@", TINY, "--rounds.epochs", "3", "--link", "1gbit"], None)


def test_advice_takes_times_of_a_batch_from_a_run_of_such_batches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "steady")
    arguments = ["--advise", "--from", str(run), "@", str(run / "config.toml"), "--link", "20mbit"]
    of_model = ["--parameters", "1e6"]
    advise([*arguments, *of_model], None)
    assert "a batch takes 0.1 to 0.2 s" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"CFG011.*rounds\.max_batch_size"):
        advise([*arguments, *of_model, "--rounds.max_batch_size", "3"], None)
    with pytest.raises(ConfigError, match=r"CFG011.*--batch-s"):
        advise([*arguments, "--batch-s", "1"], None)
