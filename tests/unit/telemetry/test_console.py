"""The console: what a person sees on a terminal, and what a log holds."""

import io
import os
import pty
import re
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from hypha_ray.telemetry.sinks import table
from hypha_ray.telemetry.sinks.console import Console


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def a_round(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "round",
        "round": number,
        "time_s": 12.5,
        "loss": 3.25,
        "samples": 1200,
        "samples_per_s": 96.0,
        "tokens": 153_600,
        "tokens_per_s": 12_288.0,
        "workers": 2,
        "batches": {0: 14, 1: 12},
        "idle_fraction": 0.031,
        "sync_s": 0.21,
        "bytes_up": 8_400_000,
        "eta_s": 125.0,
        **changes,
    }


def shown(rounds: int, *records: dict[str, Any]) -> list[str]:
    stream = io.StringIO()
    with Console(rounds, stream) as console:
        for record in records:
            console.eval(record) if record["kind"] == "eval" else console.round(record)
    return stream.getvalue().splitlines()


def test_console_without_terminal_prints_one_line_a_round_under_one_header() -> None:
    lines = shown(3, *(a_round(number) for number in range(3)))
    assert len(lines) == 4
    assert lines[0].split()[:4] == ["round", "time", "loss", "val_loss"]
    assert [line.split()[0] for line in lines[1:]] == ["1/3", "2/3", "3/3"]


def test_console_round_line_has_every_figure() -> None:
    (_, line) = shown(3, a_round(0))
    cells = ["1/3", "12.5s", "3.2500", "-", "1.20k", "96", "154k", "12.3k", "2", "14/12", "3.1", "0.21", "8.4", "2m05s"]
    assert line.split() == cells


def test_console_of_data_without_tokens_has_no_columns_of_tokens() -> None:
    images = {"tokens": None, "tokens_per_s": None}
    title, *lines = shown(2, a_round(0, **images), a_round(1, **images))
    assert title.split()[4:7] == ["samples", "samples/s", "workers"]
    assert [line.split()[4:7] for line in lines] == [["1.20k", "96", "2"]] * 2
    assert "tok" not in title


def test_console_of_rewards_shows_them_instead_of_losses() -> None:
    evaluation = {"kind": "eval", "round": 0, "reward": 0.75, "pass@1": 0.5}
    header, first, second = shown(2, evaluation, a_round(0, reward=0.5), a_round(1, reward=0.625))
    assert header.split()[:4] == ["round", "time", "reward", "val_reward"] and "loss" not in header.split()
    assert first.split()[:4] == ["1/2", "12.5s", "0.5000", "0.7500"]
    assert second.split()[2:4] == ["0.6250", "-"]
    closing = table.summary_line({"rounds": 2, "loss": 3.0, "reward": 0.75, "pass@1": 0.5})
    assert "val_reward 0.7500 (pass@1 0.5)" in closing and "loss" not in closing


def test_console_of_a_classifier_shows_the_accuracy_beside_the_validation_loss() -> None:
    evaluation = {"kind": "eval", "round": 0, "val_loss": 0.25, "accuracy": 0.875, "perplexity": None}
    header, line = shown(2, evaluation, a_round(0))
    assert header.split()[2:5] == ["loss", "val_loss", "accuracy"]
    assert line.split()[2:5] == ["3.2500", "0.2500", "0.8750"]


def test_console_of_prompts_shows_the_shares_of_solved_prompts() -> None:
    evaluation = {"kind": "eval", "round": 0, "reward": 0.5, "pass@1": 0.25, "pass@4": 0.75}
    header, line = shown(1, evaluation, a_round(0, reward=0.375))
    assert header.split()[2:6] == ["reward", "val_reward", "pass@1", "pass@4"]
    assert line.split()[2:6] == ["0.3750", "0.5000", "0.2500", "0.7500"]


def test_console_figure_that_comes_later_gets_its_column_under_a_new_header() -> None:
    evaluation = {"kind": "eval", "round": 1, "val_loss": 0.25, "accuracy": 0.875}
    first, _, second, row, last = shown(3, a_round(0), evaluation, a_round(1), a_round(2))
    assert "accuracy" not in first and second.split()[4] == "accuracy"
    assert (row.split()[4], last.split()[4]) == ("0.8750", "-")


def test_console_lines_are_aligned_whatever_is_missing() -> None:
    bare = {"kind": "round", "round": 99, "loss": None, "batches": {}, "eta_s": None, "time_s": None}
    many = a_round(100, workers=64, batches={number: 10 + number for number in range(64)}, eta_s=1e6)
    lines = shown(1000, a_round(0), bare, many)
    assert len({len(line) for line in lines}) == 1
    assert "10..73" in lines[3]


def test_console_evaluation_stands_in_the_line_of_its_round_only() -> None:
    lines = shown(3, {"kind": "eval", "round": 0, "val_loss": 4.5, "perplexity": 90.0}, a_round(0), a_round(1))
    assert [line.split()[3] for line in lines[1:]] == ["4.5000", "-"]


def test_console_evaluation_of_a_later_round_waits_for_its_line() -> None:
    lines = shown(
        3, {"kind": "eval", "round": 1, "val_loss": 4.5, "perplexity": 90.0}, a_round(0), a_round(1), a_round(2)
    )
    assert ["4.5000" in line for line in lines[1:]] == [False, True, False]


def test_console_progress_without_terminal_prints_nothing() -> None:
    stream = io.StringIO()
    console = Console(3, stream)
    console.progress(a_step(0, 10, 10))
    assert stream.getvalue() == ""


def test_console_status_and_events_are_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(3, stream, clock=clock)
    clock.now_s += 4.25
    console.status("leasing workers")
    console.event({"kind": "loss", "monotonic_s": 7.0, "wall_time": "…", "worker": 3, "reason": "killed"})
    assert stream.getvalue().splitlines() == ["[   4.2s] leasing workers", "-- loss worker=3 reason=killed"]


class Watched(io.StringIO):
    """A stream that sets `seen` once it has the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.seen = text, threading.Event()

    def write(self, text: str) -> int:
        if self.text in text:
            self.seen.set()
        return super().write(text)


def test_console_without_terminal_says_after_a_silence_which_phase_goes_on() -> None:
    stream, clock = Watched("still leasing"), Clock()
    with Console(3, stream, clock=clock, began_s=40.0, silence_s=0.01) as console:
        console.status("leasing machines")
        assert stream.seen.wait(60)
    assert stream.getvalue().splitlines()[:2] == ["[  60.0s] leasing machines", "[  60.0s] still leasing machines"]


def test_console_without_terminal_says_after_a_silence_how_far_the_round_is() -> None:
    stream, clock = Watched("round 6/20"), Clock()
    with Console(20, stream, clock=clock, silence_s=0.01) as console:
        console.round(a_round(4, eta_s=60.0))
        clock.now_s += 2.0
        console.progress({**a_step(5, 250, 1200), "samples": 250, "tokens": 2500})
        assert stream.seen.wait(60)
    assert "[   2.0s] round 6/20  250/1.20k samples  1.25k tok/s  ETA 58.0s" in stream.getvalue().splitlines()


def test_console_that_speaks_in_time_repeats_nothing() -> None:
    stream = io.StringIO()
    with Console(3, stream, silence_s=60.0) as console:
        console.status("leasing machines")
        console.note("worker 1 joined")
    assert len(stream.getvalue().splitlines()) == 2


@pytest.mark.parametrize("interactive", [None, True])
def test_console_without_rounds_shows_notes_and_the_summary(interactive: bool | None) -> None:
    stream = io.StringIO()
    with Console(3, stream, interactive=interactive, rounds=False) as console:
        console.progress(a_step(0, 10, 10))
        console.round(a_round(0))
        console.note("worker 1 was lost: killed")
        console.close({"rounds": 3})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert [line for line in shown.split() if "/3" in line] == []
    assert "-- worker 1 was lost: killed" in shown and "done: 3 rounds" in shown


def test_console_without_rounds_says_after_a_silence_how_far_the_run_is_and_not_that_it_starts() -> None:
    stream = Watched("round 2/3")
    with Console(3, stream, silence_s=0.01, rounds=False) as console:
        console.status("starting workers and building the model")
        console.round(a_round(0))
        assert stream.seen.wait(60)
        last = stream.getvalue().splitlines()[-1]
    assert "round 2/3" in last and "starting" not in last


def test_console_stream_without_unicode_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(3, stream)
    console.note("θ → worker-3")
    console.round(a_round(0))
    assert raw.getvalue().decode("ascii").splitlines()[0] == "-- ? ? worker-3"


def test_utilisation_is_a_column_and_in_the_last_line_if_there_is_one() -> None:
    stream = io.StringIO()
    with Console(2, stream) as console:
        console.round(a_round(0, mfu=0.2284))
        console.close(
            {"rounds": 1, "seconds": 1.0, "samples": 1, "tokens": 460_800, "tokens_per_s": 7089.0, "mfu": 0.2}
        )
    title, row, last = stream.getvalue().splitlines()
    assert "MFU %" in title and row[title.index("MFU %") :].split()[0] == "22.8"
    assert "461k tokens (7.09k/s, MFU 0.200)" in last


def test_last_line_has_the_largest_peak_of_memory_if_there_is_one() -> None:
    stream = io.StringIO()
    with Console(2, stream) as console:
        console.round(a_round(0))
        console.close({"rounds": 1, "seconds": 1.0, "samples": 1, "peak_memory_bytes": 23_407_372_697})
    assert "a worker's GPU memory up to 21.8 GiB" in stream.getvalue().splitlines()[-1]


def test_small_figures_arent_shown_as_zeros() -> None:
    stream = io.StringIO()
    with Console(2, stream) as console:
        console.round(a_round(0, loss=3.2174e-6, mfu=1.68e-5, sync_s=0.0042, idle_fraction=0.0))
        small = {"loss": 3.2174e-6, "mfu": 1.68e-5, "bytes_up": 8_210, "peak_memory_bytes": 33_980_132, "tokens": 9}
        console.close({"rounds": 1, "seconds": 1.0, "samples": 1, "tokens_per_s": 3.0, **small})
    titles, row, last = stream.getvalue().splitlines()
    for title, cell in {"loss": "3.22e-06", "MFU %": "0.002", "sync s": "0.004", "idle %": "0.0"}.items():
        end = titles.index(title) + len(title)
        assert row[:end].split()[-1] == cell
    assert "loss 3.22e-06" in last and "MFU 1.7e-05" in last
    assert "0.008 MB up" in last and "GPU memory up to 32 MiB" in last


def test_console_close_prints_the_summary_once() -> None:
    stream = io.StringIO()
    figures = {"rounds": 3, "seconds": 65.0, "samples": 3600, "tokens": 460_800, "tokens_per_s": 7089.0, "loss": 2.5}
    with Console(3, stream) as console:
        console.close(
            {
                **figures,
                "samples_per_s": 55.4,
                "val_loss": 2.75,
                "perplexity": 15.64,
                "bytes_up": 25_200_000,
                "traffic_ratio": 49.5,
            }
        )
    assert stream.getvalue() == (
        "done: 3 rounds in 65.0s, 3.60k samples, 461k tokens (7.09k/s), loss 2.5000, "
        "val_loss 2.7500 (perplexity 15.64), 25.2 MB up, 1/50 of a gradient exchange at every step\n"
    )


def test_console_summary_of_data_without_tokens_has_samples_a_second() -> None:
    stream = io.StringIO()
    Console(3, stream).close({"rounds": 3, "seconds": 65.0, "samples": 3600, "tokens": None, "samples_per_s": 55.4})
    assert stream.getvalue().startswith("done: 3 rounds in 65.0s, 3.60k samples (55/s), 0.0 MB up")


def test_console_summary_has_the_goodput_and_the_two_largest_losses() -> None:
    shares = {
        "training": 0.6,
        "barrier": 0.05,
        "exchange": 0.2,
        "data": 0.0,
        "evaluation": 0.0,
        "loss": 0.1,
        "start": 0.05,
    }
    stream = io.StringIO()
    Console(3, stream).close({"rounds": 3, "goodput": 0.6174, "time_shares": shares})
    assert ", goodput 0.617 (exchange 20 %, loss 10 %), 0.0 MB up" in stream.getvalue()


def test_console_summary_without_losses_has_the_goodput_alone() -> None:
    stream = io.StringIO()
    Console(3, stream).close({"rounds": 3, "goodput": 1.0, "time_shares": {"training": 0.995, "exchange": 0.005}})
    assert ", goodput 1.000, 0.0 MB up" in stream.getvalue()


def test_console_summary_names_the_sinks_that_lost_records() -> None:
    stream = io.StringIO()
    sinks = {"files": {"failed": 0, "dropped": 0}, "otel": {"failed": 2, "dropped": 1}}
    Console(3, stream).close({"rounds": 3, "sinks": sinks})
    assert stream.getvalue().rstrip().endswith(", records lost by sinks: otel 3")


def test_console_closed_pipe_does_not_reach_training() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    raw = os.fdopen(writer, "wb", buffering=0)
    console = Console(3, io.TextIOWrapper(raw, write_through=True))
    for number in range(3):
        console.round(a_round(number))
    console.close({"rounds": 3})
    raw.close()


def test_console_closed_file_does_not_reach_training() -> None:
    stream = io.StringIO()
    console = Console(3, stream)
    stream.close()
    console.round(a_round(0))
    console.close({"rounds": 1})


def frame(text: str) -> str:
    """Return what a live table's last drawing has, without control sequences."""
    last = text[text.rindex("\x1b[2K") :]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last)


def test_console_live_table_shows_the_last_fifteen_rounds() -> None:
    stream = io.StringIO()
    with Console(20, stream, interactive=True) as console:
        for number in range(20):
            console.progress({"round": number, "round_samples": 600, "round_target": 1200})
            console.round(a_round(number))
    drawn = re.findall(r"\d+/20", frame(stream.getvalue()))
    assert drawn == [f"{number}/20" for number in range(6, 21)]


def a_step(number: int, samples: int, tokens: int) -> dict[str, Any]:
    return {"kind": "step", "round": number, "round_samples": samples, "round_target": 1200, "tokens": tokens}


def test_console_live_progress_adds_up_the_reports_of_a_round() -> None:
    stream, clock = io.StringIO(), Clock()
    with Console(20, stream, interactive=True, clock=clock) as console:
        console.round(a_round(4, eta_s=60.0))
        clock.now_s += 2.0
        console.progress(a_step(5, 100, 1000))
        console.progress(a_step(5, 250, 1500))
        console.progress(a_step(4, 999, 9999))
        console.note("worker-7 joined")
        assert "round 6/20  250/1.20k samples  1.25k tok/s  ETA 58.0s" in stream.getvalue()
    assert "-- worker-7 joined" in stream.getvalue()


def test_console_live_progress_without_tokens_counts_samples() -> None:
    stream, clock = io.StringIO(), Clock()
    with Console(20, stream, interactive=True, clock=clock) as console:
        console.round(a_round(4, tokens=None, tokens_per_s=None, eta_s=None))
        clock.now_s += 2.0
        console.progress({**a_step(5, 100, 0), "samples": 100, "tokens": None})
        console.progress({**a_step(5, 250, 0), "samples": 150, "tokens": None})
        console.note("now")
        assert "round 6/20  250/1.20k samples  125 samples/s" in stream.getvalue()
    assert "tok" not in frame(stream.getvalue())


def test_console_live_progress_that_overtakes_a_round_is_kept() -> None:
    stream, clock = io.StringIO(), Clock()
    with Console(20, stream, interactive=True, clock=clock) as console:
        console.progress(a_step(5, 100, 1000))
        console.round(a_round(4, eta_s=None))
        clock.now_s += 2.0
        console.progress(a_step(5, 200, 1000))
        console.note("now")
        assert "round 6/20  200/1.20k samples  1.00k tok/s" in stream.getvalue()


def test_console_live_status_counts_the_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with Console(20, stream, interactive=True, clock=clock) as console:
        console.status("starting cluster")
        clock.now_s += 3.5
        console.note("still here")
        assert "starting cluster  3.5s" in stream.getvalue()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    monkeypatch.setenv("TERM", "xterm")
    controller, device = pty.openpty()
    with os.fdopen(device, "w") as stream:
        yield stream
    os.close(controller)


@pytest.mark.parametrize(("kind", "drawn"), [("xterm", True), ("dumb", False)])
def test_console_draws_on_a_terminal_that_can(
    terminal: TextIO, monkeypatch: pytest.MonkeyPatch, kind: str, drawn: bool
) -> None:
    monkeypatch.setenv("TERM", kind)
    with Console(3, terminal) as console:
        assert (type(console._view).__name__ == "Live") is drawn


@pytest.mark.parametrize("width", [40, 80, 100, 132])
def test_columns_fit_the_terminal_and_keep_round_and_loss(width: int) -> None:
    columns = table.fitting(width)
    assert sum(column.width + 2 for column in columns) - 2 <= width
    assert {"round", "loss"} <= {column.title for column in columns}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0"), (999, "999"), (1000, "1.00k"), (12_345, "12.3k"), (999_600, "1.00M"), (2.5e15, "2.50P")],
        *[(None, "-"), (3.0, "3"), (0.0096, "0.0096"), (0.3149, "0.31"), (1.416, "1.42"), (9.996, "10"), (15.2, "15")],
    ],
)
def test_si_count_is_short(value: float | None, text: str) -> None:
    assert table.si(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (99.9, "99.9s"),
        (100, "1m40s"),
        (3599.6, "1h00m"),
        (4020, "1h07m"),
        (273_600, "3d04h"),
        (None, "-"),
        (float("inf"), "-"),
    ],
)
def test_duration_is_short(seconds: float | None, text: str) -> None:
    assert table.duration(seconds) == text
