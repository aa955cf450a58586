"""Commands that look at runs or draw and simulate from them, as a user runs them: they need neither torch nor Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from hypha_ray.simulation.result import HEADLINE
from tests.support.job_scripts import said
from tests.support.light_commands import ROOT, Ended, light_commands
from tests.support.recorded_run import write_run
from tests.support.run_folders import evaluation, make_run, round_record

HEAVY = {"torch", "transformers", "ray", "datasets"}
FIELDS = {
    "settings",
    "rounds",
    "time_s",
    "bytes_up",
    "bytes_down",
    "utilisation",
    "idle_fraction",
    "goodput",
    "cost",
    "events",
}
"""Fields of a simulated run."""


class Look(Protocol):
    """Runs a job script in which neither torch nor Ray may be loaded."""

    def __call__(self, name: str, *arguments: str, home: Path, folder: Path = ROOT) -> Ended: ...


@pytest.fixture(scope="module")
def job() -> Iterator[Look]:
    with light_commands("numpy", "matplotlib.pyplot") as run:

        def look(name: str, *arguments: str, home: Path, folder: Path = ROOT) -> Ended:
            done = run(name, *arguments, cwd=folder, HYPHA_RAY_HOME=str(home))
            assert HEAVY.isdisjoint(done.modules)
            return done

        yield look


def test_runs_prints_a_line_a_run_and_writes_json(job: Look, tmp_path: Path) -> None:
    make_run(tmp_path / "home", commits=1, metrics=[round_record(0, 4.0), evaluation(0, 3.5)])
    done = job("runs", "--json", str(tmp_path / "runs.json"), home=tmp_path / "home")
    assert (done.returncode, said(done.stderr)) == (0, "")
    title, line = done.stdout.splitlines()
    assert title.split() == ["run", "state", "round", "objective", "age", "workers", "cost"]
    assert line.split()[:5] == ["first", "interrupted", "1/3", "val_loss", "3.5000"]
    (row,) = json.loads((tmp_path / "runs.json").read_text())
    assert (row["name"], row["state"], row["value"]) == ("first", "interrupted", 3.5)


def test_runs_of_an_empty_folder_are_none_and_a_missing_folder_is_an_error(job: Look, tmp_path: Path) -> None:
    done = job("runs", home=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"no run in {tmp_path}\n")
    done = job("runs", "--dir", str(tmp_path / "nosuch"), home=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error[CFG003]: --dir is out of range")
    done = job("runs", "--json", str(tmp_path / "no" / "such"), home=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error[CFG008]: ") and done.stderr.count("\n") == 1


def test_runs_are_listed_by_their_tags_and_the_nearest_is_named(job: Look, tmp_path: Path) -> None:
    make_run(tmp_path, "first", run={"tags": ["baseline", "2026"]})
    make_run(tmp_path, "second", run={"tags": ["baseline"]})
    make_run(tmp_path, "third")

    def listed(*tags: str) -> list[str]:
        flags = [word for tag in tags for word in ("--tag", tag)]
        done = job("runs", *flags, "--json", str(tmp_path / "runs.json"), home=tmp_path)
        assert (done.returncode, said(done.stderr)) == (0, "")
        names = sorted(row["name"] for row in json.loads((tmp_path / "runs.json").read_text()))
        assert names == sorted(line.split()[0] for line in done.stdout.splitlines()[1:])
        return names

    assert listed("baseline") == ["first", "second"]
    assert listed("baseline", "2026") == ["first"]
    none = job("runs", "--tag", "basline", home=tmp_path)
    assert none.stdout == f"no run in {tmp_path} has all of the tags 'basline'; did you mean 'baseline'?\n"


def test_runs_tells_folders_that_cannot_be_understood(job: Look, tmp_path: Path) -> None:
    make_run(tmp_path, "foreign", metrics=[{"kind": "eval", "val_loss": "low"}])
    make_run(tmp_path, "good")
    done = job("runs", home=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert done.stderr == f"note: 1 folder of {tmp_path} can't be read, such as foreign\n"


def test_configs_are_listed_and_printed_and_the_nearest_is_named(job: Look, tmp_path: Path) -> None:
    listed = job("configs", home=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(file.stem for file in (ROOT / "jobs/configs").glob("*.toml"))
    texts = dict(line.split(maxsplit=1) for line in listed)
    assert texts["tiny"] == "A small byte-level language model on two CPU cores, in about a minute"
    printed = job("configs", "tiny", home=tmp_path)
    assert printed.stdout == (ROOT / "jobs/configs/tiny.toml").read_text()
    assert job("configs", "--name", "tiny.toml", home=tmp_path).stdout == printed.stdout
    wrong = job("configs", "tinny", home=tmp_path)
    assert wrong.returncode == 2 and "did you mean 'tiny'?" in wrong.stderr


def test_explain_has_cause_and_remedy_and_names_the_nearest(job: Look, tmp_path: Path) -> None:
    done = job("explain", "CFG004", home=tmp_path)
    assert (done.returncode, said(done.stderr)) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["CFG004", "cause", "remedy"]
    assert len(job("explain", home=tmp_path).stdout.splitlines()) > 200
    wrong = job("explain", "CGF004", home=tmp_path)
    assert wrong.returncode == 2 and "did you mean CFG004" in wrong.stderr


def test_show_takes_a_name_or_a_folder_and_names_the_nearest(job: Look, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "texts-1", commits=1, metrics=[round_record(0, 4.0)])
    by_name = job("show", "texts-1", home=tmp_path)
    assert (by_name.returncode, said(by_name.stderr)) == (0, "")
    assert by_name.stdout.splitlines()[0] == f"run         texts-1, {folder}"
    assert job("show", "--run", str(folder), home=tmp_path).stdout == by_name.stdout
    wrong = job("show", "text-1", home=tmp_path)
    assert wrong.returncode == 5 and "did you mean 'texts-1'?" in wrong.stderr
    assert job("show", home=tmp_path).stderr.startswith("error[CFG012]: --run is missing")


def test_compare_takes_runs_by_position_or_flag_and_writes_a_page_or_a_plot(job: Look, tmp_path: Path) -> None:
    for name, rate in (("first", 0.1), ("second", 0.2)):
        metrics = [round_record(0, 4.0), evaluation(0, 3.5)]
        make_run(tmp_path, name, commits=1, metrics=metrics, inner_optimizer={"learning_rate": rate})
    done = job("compare", "first", "second", home=tmp_path)
    assert (done.returncode, said(done.stderr)) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[:3] == [["setting", "first", "second"], ["inner_optimizer.learning_rate", "0.1", "0.2"], []]
    assert ["val_loss", "3.5000", "3.5000"] in lines
    for flags in (("--run", "first", "--run", "second"), ("--run", "first", "second"), ("first", "--run=second")):
        assert job("compare", *flags, home=tmp_path).stdout == done.stdout
    page, plot = tmp_path / "page.html", tmp_path / "plot.png"
    written = job("compare", "first", "second", "--out", str(page), home=tmp_path)
    assert written.returncode == 0 and written.stdout.splitlines()[-1] == str(page)
    assert page.read_text().startswith("<!doctype html>") and "data:image/png;base64," in page.read_text()
    assert job("compare", "first", "second", "--out", str(plot), home=tmp_path).returncode == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_compare_refuses_one_run_an_unknown_run_and_another_kind_of_file(job: Look, tmp_path: Path) -> None:
    make_run(tmp_path, "first")
    make_run(tmp_path, "second")
    for arguments, code, error in (
        (("first",), 2, "error[CFG012]: --run is missing"),
        (("first", "secnd"), 5, "error[CKPT001]"),
        (("first", "second", "--out", "a.pdf"), 2, "error[CFG003]: --out is out of range"),
        (("first", "second", "--out", str(tmp_path / "a.png")), 3, "error[DATA044]: none of first, second"),
    ):
        done = job("compare", *arguments, home=tmp_path)
        assert done.returncode == code and done.stderr.startswith(error), done.stderr


def test_report_writes_the_page_of_a_run_or_a_file_and_prints_its_path(job: Look, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "texts-1", commits=1, metrics=[round_record(0, 4.0625), evaluation(0, 3.5)])
    done = job("report", "texts-1", home=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{folder}/report.html\n")
    text = (folder / "report.html").read_text()
    assert text.startswith("<!doctype html>") and 'data-value="4.0625"' in text
    page = tmp_path / "page.html"
    written = job("report", "--run", str(folder), "--out", str(page), "--with-hosts", home=tmp_path)
    assert (written.returncode, written.stdout) == (0, f"{page}\n") and "4.0625" in page.read_text()


def test_report_refuses_an_unknown_run_and_a_file_that_is_no_page(job: Look, tmp_path: Path) -> None:
    make_run(tmp_path, "texts-1")
    for arguments, code, error in (
        (("text-1",), 5, "error[CKPT001]: there is no run 'text-1'"),
        (("texts-1", "--out", "a.pdf"), 2, "error[CFG003]: --out is out of range"),
        (("texts-1", "--out", str(tmp_path / "no" / "a.html")), 2, "error[CFG008]: --out can't be used"),
        ((), 2, "error[CFG012]: --run is missing"),
        (("texts-1", "--with-host"), 2, "error[CFG001]"),
    ):
        done = job("report", *arguments, home=tmp_path)
        assert done.returncode == code and done.stderr.startswith(error), done.stderr


def test_plot_of_a_run_prints_the_files_it_drew(job: Look, tmp_path: Path) -> None:
    record = {"kind": "round", "round": 0, "time_s": 1.0, "loss": 2.0, "samples_total": 10, "batches": {"0": 3}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    done = job("plot", "--run", str(tmp_path), home=tmp_path)
    assert (done.returncode, said(done.stderr)) == (0, "")
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert [path.name for path in paths] == ["loss.png", "batches.png", "finish.png", "bytes.png", "utilisation.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_plot_takes_a_run_by_its_name_with_or_without_the_flag(job: Look, tmp_path: Path) -> None:
    record = {"kind": "round", "round": 0, "time_s": 1.0, "loss": 2.0, "samples_total": 10, "batches": {"0": 3}}
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "first" / "config.toml").write_text("")
    elsewhere = tmp_path / "elsewhere"
    for arguments, home in (
        (["first"], tmp_path),
        (["--run", "first"], tmp_path),
        (["first", "--dir", str(tmp_path)], elsewhere),
    ):
        done = job("plot", *arguments, home=home)
        assert (done.returncode, said(done.stderr)) == (0, "")
        assert done.stdout.splitlines()[0] == str(tmp_path / "first" / "plots" / "loss.png")
    done = job("plot", "frist", home=tmp_path)
    assert done.returncode == 5 and "did you mean 'first'?" in said(done.stderr)


def test_plot_of_an_empty_folder_is_one_line_and_exit_three(job: Look, tmp_path: Path) -> None:
    done = job("plot", "--run", str(tmp_path), home=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = said(done.stderr).splitlines()
    assert line.startswith(f"error[DATA044]: {tmp_path}/metrics.jsonl does not exist")


def test_simulate_from_a_run_prints_the_best_of_all_tries_and_writes_them(job: Look, tmp_path: Path) -> None:
    write_run(tmp_path / "steady")
    tries = ["--try", "sync.codec=int4", "--try", "sync.delay_steps=2,rounds.samples_between_updates=60"]
    words = ("--from", "steady", *tries, "--deadline", "6h", "--json", str(tmp_path / "rows.json"))
    done = job("simulate", *words, home=tmp_path)
    assert (done.returncode, said(done.stderr)) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "simulated: times, bytes and costs; no loss curve"
    assert any(line.startswith("best: sync.delay_steps=2,rounds.samples_between_updates=60") for line in lines)
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["try"] for row in rows] == ["as recorded", tries[1], tries[3]]
    assert rows[1]["bytes_up"] < rows[0]["bytes_up"] / 7


def test_table_has_a_row_for_each_point_of_a_sweep_and_plots_are_drawn(job: Look, tmp_path: Path) -> None:
    completed = job("simulate", "rack", "--workers=2", "--rounds=2", "--plot", str(tmp_path / "plots"), home=tmp_path)
    assert completed.returncode == 0, completed.stderr
    first, _, *rows = completed.stdout.splitlines()
    assert first == HEADLINE
    assert "codec=fp32" in rows[0]
    assert "codec=int4" in rows[1]
    plots = sorted((tmp_path / "plots").glob("*.png"))
    assert [plot.stem for plot in plots] == ["bytes", "rounds", "use"]
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert all(str(plot) in rows for plot in plots)


@pytest.mark.slow
def test_equal_seeds_give_equal_bytes_whatever_the_hashes(tmp_path: Path) -> None:
    arguments = ("--scenario", "home-1000", "--workers", "40", "--rounds", "4", "--json")
    written: list[bytes] = []
    for number, (seed, hash_seed) in enumerate([("1", "0"), ("1", "4711"), ("2", "0")]):
        file = tmp_path / f"{number}.json"
        command = [sys.executable, "jobs/simulate.py", *arguments, str(file), "--seed", seed]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout.splitlines()[0] == HEADLINE
        written.append(file.read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]
    (result,) = json.loads(written[0])
    assert result.keys() >= FIELDS
    assert result["settings"]["workers"] == 40
    assert result["settings"]["seed"] == 1
    assert result["rounds"] == 4
