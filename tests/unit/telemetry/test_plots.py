"""Plots: drawn from the files of a run, whatever is missing in them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from hypha_ray.errors import DataError
from hypha_ray.fleet_time import TIME_KINDS
from hypha_ray.telemetry import plots
from hypha_ray.telemetry.plots import PALETTE, draw
from hypha_ray.telemetry.series import Series
from hypha_ray.telemetry.sinks.files import JsonLines, write_json

NAMES = ["loss.png", "batches.png", "finish.png", "bytes.png", "utilisation.png"]


def a_round(number: int, workers: int = 2) -> dict[str, Any]:
    return {
        "kind": "round",
        "round": number,
        "time_s": 2.5,
        "finish_s": 2.0,
        "predicted_s": None if number == 0 else 2.5,
        "plan_error": None if number == 0 else 0.25,
        "loss": 4.0 / (number + 1),
        "samples_total": 100 * (number + 1),
        "batches": {str(worker): 5 + worker for worker in range(workers)},
        "bytes_up": 1000,
        "bytes_down": 1000,
        "sync_s": 0.1,
        "idle_fraction": 0.2,
        "data_wait_fraction": 0.01,
    }


def a_run(directory: Path, *records: dict[str, Any]) -> Path:
    lines = JsonLines(directory / "metrics.jsonl")
    for record in records:
        lines.write(record)
    lines.close()
    return directory


def inked(path: Path) -> float:
    """Return the part of an image that isn't white."""
    return float((imread(path)[..., :3] < 0.98).any(axis=-1).mean())


def with_shares(number: int, **shares: float) -> dict[str, Any]:
    all_shares = dict.fromkeys(TIME_KINDS, 0.0) | shares
    return a_round(number) | {"goodput": 0.5, "fleet_s": 9.0, "time_shares": all_shares}


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3])
def test_plot_of_time_shows_shares_as_areas_of_their_size(tmp_path: Path, rounds: int) -> None:
    a_run(tmp_path, *(with_shares(number, training=0.75, loss=0.25) for number in range(rounds)))
    (path,) = [path for path in draw(tmp_path) if path.name == "time.png"]
    image = imread(path)[..., :3]
    training = np.isclose(image, to_rgb(PALETTE[0]), atol=0.01).all(axis=-1).sum()
    lost = np.isclose(image, to_rgb(PALETTE[TIME_KINDS.index("loss")]), atol=0.01).all(axis=-1).sum()
    assert 2.5 < training / lost < 3.5 and lost > 0.01 * image[..., 0].size


@pytest.mark.slow
def test_run_of_an_earlier_version_has_no_plot_of_time(tmp_path: Path) -> None:
    assert not [path for path in draw(a_run(tmp_path, a_round(0))) if path.name == "time.png"]


@pytest.mark.slow
def test_draw_finished_run_has_five_plots(tmp_path: Path) -> None:
    evaluations = [{"kind": "eval", "round": number, "val_loss": 4.0 / (number + 1)} for number in range(5)]
    a_run(tmp_path, *evaluations, *(a_round(number) for number in range(4)))
    write_json(tmp_path / "summary.json", {"parameter_bytes": 5000})
    paths = draw(tmp_path)
    assert [path.relative_to(tmp_path) for path in paths] == [Path("plots") / name for name in NAMES]
    assert all(imread(path).shape[0] > 300 and inked(path) > 0.02 for path in paths)


@pytest.mark.slow
@pytest.mark.parametrize("figures", [{"val_loss": 1.0, "accuracy": 0.5}, {"reward": 0.4, "pass@1": 0.2, "pass@4": 0.6}])
def test_draw_figures_of_the_task_have_a_plot_with_a_curve_each(tmp_path: Path, figures: dict[str, float]) -> None:
    evaluations = [{"kind": "eval", "round": number, **figures} for number in range(1, 4, 2)]
    paths = draw(a_run(tmp_path, *(a_round(number) for number in range(4)), *evaluations))
    assert paths[1].name == "task.png" and inked(paths[1]) > 0.02
    series = Series([*(a_round(number) for number in range(4)), *evaluations], {})
    by_samples, _ = plots._task(series).axes
    curves = {str(line.get_label()): line for line in by_samples.get_lines()}
    expected = {name: value for name, value in figures.items() if name not in ("val_loss", "reward")}
    assert list(curves) == [f"{name}, validation" for name in expected]
    for name, value in expected.items():
        curve = curves[f"{name}, validation"]
        assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([200, 400], [value, value])


def test_own_metrics_that_are_no_fractions_are_within_the_panel() -> None:
    evaluations = [{"kind": "eval", "round": 0, "accuracy": 0.5, "metric/error": 7.5}]
    for axes in plots._task(Series([a_round(0), *evaluations], {})).axes:
        low, high = axes.get_ylim()
        assert low < 0.5
        assert high > 7.5
        assert axes.get_ylabel() == ""


@pytest.mark.parametrize("length", [4, 90])
def test_legend_has_room_beside_the_panels_however_long_its_names_are(length: int) -> None:
    name = "m" * length
    series = Series([a_round(0), a_round(1)], {})
    series.tasks = {0: {name: 0.5}, 1: {name: 0.6}}
    canvas = FigureCanvasAgg(plots._task(series))
    plots.place_panels(canvas)
    canvas.draw()
    left, right = canvas.figure.axes
    legend = right.get_legend()
    assert legend is not None
    box = legend.get_window_extent()
    assert box.x0 > right.get_window_extent().x1 > right.get_window_extent().x0 > left.get_window_extent().x1
    assert box.x1 < canvas.figure.bbox.x1


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "workers"), [(1, 1), (70, 2), (3, 30)])
def test_draw_any_number_of_rounds_and_workers_succeeds(tmp_path: Path, rounds: int, workers: int) -> None:
    paths = draw(a_run(tmp_path, *(a_round(number, workers) for number in range(rounds))))
    assert [path.name for path in paths] == NAMES


@pytest.mark.slow
def test_draw_rounds_with_nothing_in_them_succeeds(tmp_path: Path) -> None:
    empty = {"kind": "round", "round": 0}
    assert len(draw(a_run(tmp_path, empty, {"kind": "eval", "round": 0, "val_loss": None}))) == len(NAMES)


@pytest.mark.slow
def test_draw_twice_replaces_the_plots(tmp_path: Path) -> None:
    a_run(tmp_path, a_round(0), a_round(1))
    (first, *_) = draw(tmp_path)
    before = first.read_bytes()
    a_run(tmp_path, *(a_round(number) for number in range(2, 9)))
    draw(tmp_path)
    assert first.read_bytes() != before
    assert sorted(path.name for path in first.parent.iterdir()) == sorted(NAMES)


@pytest.mark.slow
def test_draw_knows_the_gradient_exchange_only_from_the_summary(tmp_path: Path) -> None:
    a_run(tmp_path, a_round(0), a_round(1))
    without = draw(tmp_path)[3].read_bytes()
    write_json(tmp_path / "summary.json", {"parameter_bytes": 5000})
    assert draw(tmp_path)[3].read_bytes() != without


@pytest.mark.parametrize("content", [None, "", '{"kind": "step", "round": 0}\n', '{"kind": "rou'])
def test_draw_run_without_rounds_is_a_data_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "metrics.jsonl"))) as caught:
        draw(tmp_path)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    "damage",
    [
        {"loss": "low"},
        {"time_s": "noon"},
        {"batches": [3]},
        {"batches": {"0": "x"}},
    ],
)
def test_draw_damaged_record_is_a_data_error(tmp_path: Path, damage: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"DATA044.*metrics\.jsonl has a round that can't be plotted"):
        draw(a_run(tmp_path, a_round(0), a_round(1) | damage))


@pytest.mark.parametrize("blocked", ["metrics.jsonl", "plots"])
def test_draw_what_cannot_be_read_or_written_is_a_data_error(tmp_path: Path, blocked: str) -> None:
    if blocked == "metrics.jsonl":
        (tmp_path / blocked).mkdir()
    else:
        a_run(tmp_path, a_round(0))
        (tmp_path / blocked).write_text("")
    with pytest.raises(DataError, match=rf"DATA044.*can't be drawn.*{blocked}"):
        draw(tmp_path)


def test_series_evaluation_lies_where_its_round_ended() -> None:
    series = Series([a_round(0), a_round(1)], {})
    totals = series.column("samples_total")
    assert [series.total_after(totals, number) for number in (-1, 0, 1)] == [0.0, 100.0, 200.0]


def test_series_worker_that_joined_late_has_no_batches_before() -> None:
    series = Series([a_round(0, workers=1), a_round(1, workers=11)], {})
    assert series.workers == [str(worker) for worker in range(11)]
    assert series.batches("10") == [0, 15]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
def test_utilisation_has_samples_a_second_and_tokens_where_there_are_any(tmp_path: Path, tokens: bool) -> None:
    rows = [{**a_round(number), "samples_per_s": 40.0, "scored_per_s": 40.0} for number in range(3)]
    draw(a_run(tmp_path, *({**row, "tokens_per_s": 900.0} if tokens else row for row in rows)))
    height, *_ = imread(tmp_path / "plots" / "utilisation.png").shape
    assert round(height / (2.6 * 130)) == 3 + tokens


def test_plots_of_optimizers_and_policy_have_the_curves_of_the_records() -> None:
    records = [
        a_round(number) | {"learning_rate": 0.5 - number / 10, "entropy": 2.0, "kl": 0.25} for number in range(3)
    ]
    report = {"kind": "step", "worker": 1, "round": 1, "round_samples": 50, "round_target": 200, "gradient_norm": 7.0}
    series = Series([*records, report, {**report, "gradient_norm": None}], {})
    rate, norm = plots._optimizer(series).axes
    assert [list(line.get_ydata()) for line in rate.get_lines()] == [[0.5, 0.4, 0.3]]
    (line,) = norm.get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata()), line.get_label()) == ([1.25], [7.0], "worker 1")
    entropy, divergence = plots._policy(series).axes
    assert [list(axes.get_lines()[0].get_ydata()) for axes in (entropy, divergence)] == [[2.0] * 3, [0.25] * 3]


@pytest.mark.slow
def test_plots_tell_run_date_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts-$1$"
    folder.mkdir()
    (folder / "config.toml").write_text('[model]\nrepository = "openai-community/gpt2"\n')
    a_run(folder, a_round(0) | {"wall_time": "2026-11-28T04:00:00.000+00:00"})
    captions: list[str] = []
    place_panels = plots.place_panels

    def noticed(canvas: FigureCanvasAgg) -> None:
        captions.extend(text.get_text() for text in canvas.figure.texts if "gpt2" in text.get_text())
        place_panels(canvas)

    monkeypatch.setattr(plots, "place_panels", noticed)
    assert len(draw(folder)) == 5
    assert captions == ["texts-$1$, 28 November 2026, openai-community/gpt2"] * 5
