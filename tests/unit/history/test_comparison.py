"""The comparison of runs: settings, figures, plot and page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from hypha_ray.errors import ConfigError, DataError
from hypha_ray.history.comparison import compared, draw_run, page, picture_of
from hypha_ray.telemetry.plots import panels, style
from hypha_ray.telemetry.series import Series, summary
from tests.support.run_folders import charts_of_page, evaluation, make_run, round_record

FIRST = [round_record(0, 4.0), evaluation(0, 3.5), round_record(1, 3.0), evaluation(1, 3.25)]
KINDS = ("training", "validation")
"""Curves of a run."""
PNG = b"\x89PNG\r\n"


def test_settings_that_differ_are_those_of_the_job_files_without_name_and_folder(tmp_path: Path) -> None:
    first = make_run(tmp_path, "first", inner_optimizer={"learning_rate": 0.25})
    second = make_run(tmp_path / "elsewhere", "second", inner_optimizer={"learning_rate": 0.5})
    model = {"config": {"model_type": "gpt2", "n_layer": 3}}
    third = make_run(tmp_path, "third", model=model, inner_optimizer={"learning_rate": 0.25})
    comparison = compared([first, second, third])
    assert comparison.names == ("first", "second", "third")
    assert {row[0]: row[1:] for row in comparison.settings} == {
        "inner_optimizer.learning_rate": ("0.25", "0.5", "0.25"),
        "model.config.model_type": ("'llama'", "'llama'", "'gpt2'"),
        "model.config.n_layer": ("-", "-", "3"),
    }


def test_figures_are_those_that_any_run_has(tmp_path: Path) -> None:
    first = make_run(tmp_path, "first", commits=2, metrics=FIRST, events=[{"kind": "cost", "cost": 0.5}])
    second = make_run(tmp_path, "second", commits=1, metrics=[round_record(0, -0.1, reward=0.25)])
    figures = {row[0]: row[1:] for row in compared([first, second]).figures}
    assert figures["rounds"] == ("2", "1")
    assert figures["loss"] == ("3.0000", "-0.1000")
    assert (figures["val_loss"], figures["best val_loss"]) == (("3.2500", "-"), ("3.2500", "-"))
    assert (figures["bytes up"], figures["training time"]) == (("2.00kB", "1.00kB"), ("4.0s", "2.0s"))
    assert figures["cost"] == ("0.5000", "-")
    assert "perplexity" not in figures and "tokens" not in figures


def test_runs_of_one_name_are_called_by_their_folders(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent, "same") for parent in ("a", "b")]
    assert compared(folders).names == tuple(map(str, folders))


def test_page_is_whole_in_one_file_with_all_cells(tmp_path: Path) -> None:
    first = make_run(tmp_path, "first", commits=2, metrics=FIRST)
    second = make_run(tmp_path, "second", dataset={"path": "<b>&"}, commits=1, metrics=[round_record(0, 5.0)])
    comparison = compared([first, second])
    text = page(comparison)
    cells: list[str] = []
    tags: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: object) -> None:
            tags.add(tag)

        def handle_data(self, data: str) -> None:
            cells.append(data)

    Reader().feed(text)
    for row in (*comparison.settings, *comparison.figures):
        assert all(cell in cells for cell in row), row
    assert "'<b>&'" in cells and "b" not in tags and "link" not in tags


def test_page_has_every_run_of_each_figure_by_samples_and_by_time(tmp_path: Path) -> None:
    first = make_run(tmp_path, "first", commits=2, metrics=FIRST)
    second = make_run(tmp_path, "second", commits=1, metrics=[round_record(0, 5.0)])
    third = make_run(tmp_path, "third", commits=1, metrics=[round_record(0, -0.1, reward=0.25)])
    drawn = charts_of_page(page(compared([first, second, third])))
    assert list(drawn) == ["Loss by samples", "Loss by time", "Reward by samples", "Reward by time"]
    curves = {trace["name"]: (trace["x"], trace["y"]) for trace in drawn["Loss by samples"]["data"]}
    assert curves == {
        "training of first": ([10, 20], [4.0, 3.0]),
        "validation of first": ([10, 20], [3.5, 3.25]),
        "training of second": ([10], [5.0]),
    }
    assert [trace["x"] for trace in drawn["Loss by time"]["data"]] == [[2.0, 4.0], [2.0, 4.0], [2.0]]
    assert [trace["y"] for trace in drawn["Reward by samples"]["data"]] == [[0.25]]
    colours = [trace["line"]["color"] for trace in drawn["Loss by samples"]["data"]]
    assert colours[0] == colours[1] != colours[2]


def test_runs_without_a_round_have_no_plot(tmp_path: Path) -> None:
    comparison = compared([make_run(tmp_path, "first"), make_run(tmp_path, "second")])
    assert picture_of(comparison) is None
    assert "<figure" not in page(comparison)


def test_damaged_job_file_and_foreign_records_are_errors(tmp_path: Path) -> None:
    first = make_run(tmp_path, "first")
    foreign = make_run(tmp_path, "foreign", metrics=[round_record(0, 4.0, time_s="long")])
    with pytest.raises(DataError, match=r"DATA044.*can't be understood"):
        compared([first, foreign])
    (first / "config.toml").write_text("[run")
    with pytest.raises(DataError, match=r"DATA044.*job file of"):
        compared([first, foreign])


def test_figures_are_those_of_the_summary_with_margin_own_metrics_and_the_time_after_the_last_round(
    tmp_path: Path,
) -> None:
    shares = {"training": 1.0}
    rounds = [round_record(0, 1.0, fleet_s=4.0, possible_samples=20.0, time_shares=shares)]
    records = [*rounds, evaluation(0, 0.5, **{"margin": 0.25, "metric/error": 7.5})]
    events = [{"kind": "fleet_time", "fleet_s": 4.0, "possible_samples": 20.0, "time_shares": {"evaluation": 1.0}}]
    first = make_run(tmp_path, "first", commits=1, metrics=records, events=events)
    second = make_run(tmp_path, "second", commits=1, metrics=rounds)
    figures = {row[0]: row[1:] for row in compared([first, second]).figures}
    assert summary(records, events)["goodput"] == 0.25
    assert figures["goodput"] == ("25.0%", "50.0%")
    assert figures["margin"] == ("0.2500", "-")
    assert figures["metric/error"] == ("7.5000", "-")


def test_run_named_twice_is_refused(tmp_path: Path) -> None:
    first = make_run(tmp_path, "first")
    with pytest.raises(ConfigError, match="first twice"):
        compared([first, make_run(tmp_path, "second"), first])


def test_legend_has_every_run_and_takes_no_name_for_a_formula(tmp_path: Path) -> None:
    odd = make_run(tmp_path / "a $frac{$", "same", commits=1, metrics=FIRST)
    hidden = make_run(tmp_path, "_same", commits=1, metrics=FIRST)
    picture = picture_of(compared([odd, hidden]))
    assert picture is not None and picture.startswith(PNG)
    names = [str(odd), "_same"]
    series = {name: Series(FIRST, {}) for name in names}
    with style():
        axes = panels("Runs", columns=2)[1]
        for name in names:
            draw_run((axes[0], axes[1]), series[name], "loss", name, "red")
        legend = axes[1].legend()
    texts = legend.get_texts()
    assert [text.get_text() for text in texts] == [f"{kind} of {name}" for name in names for kind in KINDS]
    assert not any(text.get_parse_math() for text in texts)
