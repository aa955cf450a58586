"""The files of a run: what is written can be read, whatever happened to the writer."""

import json
import math
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from hypha_ray.fleet_time import TIME_KINDS
from hypha_ray.telemetry.series import Series, summary
from hypha_ray.telemetry.sinks.files import (
    EVENTS,
    METRICS,
    JsonLines,
    Record,
    newest_records,
    read_json,
    read_jsonl,
    rewind,
    since_first_attempt_s,
    uncommitted_s,
    write_json,
)


def write(path: Path, *records: Record) -> None:
    lines = JsonLines(path)
    for record in records:
        lines.write(record)
    lines.close()


def a_round(number: int, **changes: object) -> dict[str, object]:
    return {
        "kind": "round",
        "round": number,
        "time_s": 2.0,
        "elapsed_s": 2.0 * (number + 1),
        "loss": 4.0 - number,
        "samples_total": 100 * (number + 1),
        "tokens_total": 1000 * (number + 1),
        "batches": {"0": 6, "1": 4},
        "bytes_up": 50,
        "bytes_down": 40,
        "idle_fraction": 0.5 if number < 2 else 0.1,
        "plan_error": None if number == 0 else -0.2,
        "rejected": 1,
        "epoch": number // 2,
        **changes,
    }


def test_newest_records_are_the_last_of_their_kinds_however_far_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    steps = [{"kind": "step", "round": number, "text": '"kind": "eval"'} for number in range(5000)]
    write(path, a_round(0), {"kind": "eval", "round": 0}, a_round(1), *steps)
    with path.open("a") as file:
        file.write('{"kind": "round", "round": 2')  # Its writer was killed.
    assert newest_records(path, ("round", "eval", "stop")) == {
        "round": a_round(1),
        "eval": {"kind": "eval", "round": 0},
    }
    assert newest_records(tmp_path / "nosuch", ("round",)) == {}


def test_records_of_a_kind_are_read_whatever_spaces_a_writer_puts(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind":"eval","round":1}\n{"round": 2, "kind"  :  "eval"}\n{"kind": "evaluation"}\n')
    assert [record["round"] for record in read_jsonl(path, ("eval",))] == [1, 2]


def test_json_lines_record_is_readable_before_close(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "deeper" / "metrics.jsonl")
    lines.write({"kind": "step", "loss": 1.5})
    assert read_jsonl(tmp_path / "deeper" / "metrics.jsonl") == [{"kind": "step", "loss": 1.5}]
    lines.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_json_lines_not_finite_becomes_null(tmp_path: Path, value: float) -> None:
    write(tmp_path / "m.jsonl", {"kind": "round", "loss": value, "batch_s": {1: value}})
    assert (tmp_path / "m.jsonl").read_text() == '{"kind": "round", "loss": null, "batch_s": {"1": null}}\n'


def test_json_lines_numpy_and_paths_become_numbers_and_text(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", {"kind": "x", "n": np.int64(3), "x": np.float32(0.5), "ok": True, "at": Path("a/b")})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"kind": "x", "n": 3, "x": 0.5, "ok": True, "at": "a/b"}]


def test_text_that_is_not_unicode_is_written_as_json_and_comes_back(tmp_path: Path) -> None:
    name = b"caf\xe9.txt".decode(errors="surrogateescape")
    write(tmp_path / "m.jsonl", {"kind": "loss", "reason": name}, {"kind": "loss", "reason": "θ"})
    write_json(tmp_path / "summary.json", {"reason": name})
    assert [event["reason"] for event in read_jsonl(tmp_path / "m.jsonl")] == [name, "θ"]
    assert read_json(tmp_path / "summary.json") == {"reason": name}
    assert "θ".encode() in (tmp_path / "m.jsonl").read_bytes()


def test_read_jsonl_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"kind": "round", "round": 0}, {"kind": "round", "round": 1})
    path.write_bytes(path.read_bytes()[:-7])
    assert read_jsonl(path) == [{"kind": "round", "round": 0}]


@pytest.mark.parametrize("torn", [b"", b'{"kind": "rou', b'{"kind": "\xce', b"null", b"[1]"])
def test_json_lines_after_a_torn_line_loses_no_record(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"kind": "round", "round": 0})
    path.write_bytes(path.read_bytes() + torn)
    write(path, {"kind": "round", "round": 1})
    assert [record["round"] for record in read_jsonl(path)] == [0, 1]


def test_read_jsonl_kinds_leaves_out_the_others(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", {"kind": "step"}, {"kind": "round"}, {"kind": "eval"}, {"none": 1})
    assert read_jsonl(tmp_path / "m.jsonl", ("round", "eval")) == [{"kind": "round"}, {"kind": "eval"}]


def test_line_that_is_nested_too_deep_is_passed_over_as_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, {"kind": "round", "round": 0})
    depth = 10 * sys.getrecursionlimit()
    with path.open("a") as file:
        file.write('{"kind": "round", "round": 1, "loss": ' + "[" * depth + "]" * depth + "}\n")
    assert [record["round"] for record in read_jsonl(path)] == [0]
    assert newest_records(path, ["round"])["round"]["round"] == 0


def test_read_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == []
    assert read_json(tmp_path / "none.json") == {}


def test_write_json_replaces_whole_file_and_leaves_no_draft(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"a": list(range(1000))})
    write_json(tmp_path / "summary.json", {"loss": math.nan})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_summary_says_why_its_last_attempt_ended_early() -> None:
    stopped = [{"kind": "attempt", "attempt": 1}, {"kind": "stop", "reason": "no better val_loss"}]
    assert summary([], stopped)["ended_early"] == "no better val_loss"
    assert summary([], [*stopped, {"kind": "attempt", "attempt": 2}])["ended_early"] is None


def test_summary_of_three_rounds_adds_up() -> None:
    evaluations = [
        {"kind": "eval", "round": 0, "val_loss": 5.0, "perplexity": 148.4},
        {"kind": "eval", "round": 2, "val_loss": 2.0, "perplexity": 7.4},
        {"kind": "eval", "round": 3, "val_loss": 2.5, "perplexity": 12.2},
    ]
    events = [{"kind": "join"}, {"kind": "loss", "worker": 1}, {"kind": "commit"}]
    figures = summary([*(a_round(n) for n in range(3)), *evaluations], events, parameter_bytes=20)
    assert figures == {
        "rounds": 3,
        "samples": 300,
        "tokens": 3000,
        "seconds": 6.0,
        "samples_per_s": 50.0,
        "tokens_per_s": 500.0,
        "mfu": None,
        "epochs": 1,
        "loss": 2.0,
        "val_loss": 2.5,
        "perplexity": 12.2,
        "best_val_loss": 2.0,
        "best_perplexity": 7.4,
        "best_round": 2,
        "ended_early": None,
        "goodput": None,
        "time_shares": None,
        "idle_fraction": 0.1,
        "plan_error": pytest.approx(0.2),
        "peak_memory_bytes": None,
        "bytes_up": 150,
        "bytes_down": 120,
        "inner_steps": 30,
        "every_step_bytes": 600,
        "traffic_ratio": 4.0,
        "rejected": 3,
        "workers_lost": 1,
        "cost": None,
        "slices_quarantined": 0,
    }


def test_summary_of_rewards_has_the_highest_one() -> None:
    rewards = {0: 0.1, 1: 0.9, 2: 0.4}
    evaluations = [{"kind": "eval", "round": n, "reward": one, "pass@1": one / 2} for n, one in rewards.items()]
    figures = summary([*(a_round(n) for n in range(3)), *evaluations], [{"kind": "cost", "cost": 0.5}] * 3)
    assert figures["cost"] == 1.5
    found = {name: figures[name] for name in ("reward", "pass@1", "best_reward", "best_pass@1", "best_round")}
    assert found == {"reward": 0.4, "pass@1": 0.2, "best_reward": 0.9, "best_pass@1": 0.45, "best_round": 1}
    assert not {"val_loss", "best_val_loss"} & figures.keys()


def test_summary_of_a_round_trained_again_counts_it_once() -> None:
    again = a_round(1, loss=1.0, bytes_up=70, elapsed_s=2.0)
    figures = summary([a_round(0), a_round(1), again])
    assert (figures["rounds"], figures["loss"], figures["bytes_up"], figures["seconds"]) == (2, 1.0, 120, 4.0)


def test_time_of_rounds_that_overlap_counts_once_in_summary_and_plots() -> None:
    """Each round begins 0.5 s before the end of the one before it; the last one follows a resumption."""
    rounds = [a_round(number, time_s=2.5 if number else 2.0) for number in range(4)]
    resumed = a_round(4, time_s=2.5, elapsed_s=7.0)
    figures = summary([*rounds, resumed])
    assert (figures["seconds"], figures["samples_per_s"]) == (10.5, 500 / 10.5)
    assert Series([*rounds, resumed], figures).seconds == [2.0, 4.0, 6.0, 8.0, 10.5]


def test_summary_of_data_without_tokens_has_none() -> None:
    figures = summary([a_round(number, tokens_total=None) for number in range(3)])
    assert (figures["samples"], figures["samples_per_s"]) == (300, 50.0)
    assert (figures["tokens"], figures["tokens_per_s"]) == (None, None)


def test_summary_without_the_first_rounds_is_of_the_others_alone() -> None:
    """The rounds before were trained where nothing but the commit log has come from."""
    whole = [a_round(number, samples=100, tokens=1000) for number in range(5)]
    figures = summary(whole[2:])
    assert figures["rounds"] == 3
    assert (figures["samples"], figures["tokens"], figures["seconds"]) == (300, 3000, 6.0)
    assert (figures["samples_per_s"], figures["tokens_per_s"]) == (50.0, 500.0)
    assert (figures["bytes_up"], figures["inner_steps"]) == (150, 30)


def test_summary_of_nothing_has_no_figures() -> None:
    figures = summary([])
    assert (figures["rounds"], figures["samples"], figures["loss"], figures["val_loss"]) == (0, 0, None, None)
    assert figures["traffic_ratio"] is None
    assert figures["tokens_per_s"] is None


def test_rewind_drops_what_rounds_that_are_trained_again_said(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    kept: list[Record] = [
        {"kind": "status", "text": "begins"},
        {"kind": "step", "round": 0, "worker": 0},
        a_round(0),
        {"kind": "eval", "round": 0, "val_loss": 3.0},
        {"kind": "problem", "round": 2, "text": "the disk was full"},
    ]
    again: list[Record] = [{"kind": kind, "round": number} for number in (1, 2) for kind in ("step", "round", "eval")]
    write(path, *kept[:3], *again, *kept[3:])
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "rou')
    rewind(path, 1)
    assert read_jsonl(path) == json.loads(json.dumps(kept))
    before = path.read_bytes()
    rewind(path, 1)
    assert path.read_bytes() == before and [child.name for child in tmp_path.iterdir()] == ["m.jsonl"]
    rewind(path, 0)
    assert [record["kind"] for record in read_jsonl(path)] == ["status", "problem"]


def test_rewind_of_a_file_that_is_not_there_makes_none(tmp_path: Path) -> None:
    rewind(tmp_path / "m.jsonl", 0)
    assert list(tmp_path.iterdir()) == []


def test_summary_has_the_utilisation_over_the_time_of_all_rounds_or_none() -> None:
    rounds = [a_round(0) | {"mfu": 0.1, "time_s": 30.0}, a_round(1) | {"mfu": 0.2, "time_s": 10.0}]
    assert summary(rounds)["mfu"] == pytest.approx(0.125)
    assert summary([*rounds, a_round(2)])["mfu"] is None


def test_summary_has_the_largest_peak_of_memory_of_all_rounds_and_workers() -> None:
    rounds = [a_round(0) | {"peak_memory_bytes": {0: 5, 1: 9}}, a_round(1), a_round(2) | {"peak_memory_bytes": {0: 7}}]
    assert summary(rounds)["peak_memory_bytes"] == 9


def shares(**used: float) -> dict[str, float]:
    return dict.fromkeys(TIME_KINDS, 0.0) | used


def test_summary_weighs_shares_of_time_by_their_seconds_and_adds_what_comes_after_the_last_round() -> None:
    first = a_round(0, samples=100, fleet_s=10.0, time_shares=shares(training=0.5, start=0.5), possible_samples=200.0)
    second = a_round(1, samples=50, fleet_s=20.0, time_shares=shares(training=0.8, loss=0.2), possible_samples=80.0)
    end = {"kind": "fleet_time", "fleet_s": 10.0, "time_shares": shares(evaluation=1.0), "possible_samples": 20.0}
    figures = summary([first, second], [end])
    assert figures["goodput"] == pytest.approx(150 / 300)
    wanted = shares(training=21 / 40, start=5 / 40, loss=4 / 40, evaluation=10 / 40)
    assert figures["time_shares"] == pytest.approx(wanted)


def test_summary_of_records_of_an_earlier_version_counts_only_the_samples_of_those_with_times() -> None:
    timed = a_round(1, samples=50, fleet_s=20.0, time_shares=shares(training=1.0), possible_samples=100.0)
    assert summary([a_round(0, samples=1000), timed])["goodput"] == 0.5


def test_time_since_the_first_attempt_is_not_that_since_the_newest(tmp_path: Path) -> None:
    assert since_first_attempt_s(tmp_path) == 0.0
    hours_before = [timedelta(hours=2), timedelta(hours=1)]
    attempts = [{"kind": "attempt", "wall_time": (datetime.now(UTC) - before).isoformat()} for before in hours_before]
    write(tmp_path / EVENTS, *attempts)
    assert since_first_attempt_s(tmp_path) == pytest.approx(7200, abs=60)


def test_uncommitted_time_is_that_of_records_after_the_last_commit(tmp_path: Path) -> None:
    write(tmp_path / METRICS, a_round(0, elapsed_s=5.0), {"kind": "step", "round": 1, "elapsed_s": 7.5})
    write(tmp_path / EVENTS, {"kind": "attempt"})
    assert uncommitted_s(tmp_path, {"elapsed_s": 4.5}) == 3.0
    write(tmp_path / EVENTS, {"kind": "fleet_time"})
    assert uncommitted_s(tmp_path, {"elapsed_s": 4.5}) == 0.0
    assert uncommitted_s(tmp_path / "none", {}) == 0.0
