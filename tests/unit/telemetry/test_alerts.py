"""Alerts: when a condition is told, that it is told once, and that an attempt goes on from the one before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config.training import Alert
from hypha_ray.telemetry.alerts import AlertBook, Notice

AGE = Alert(metric="commit_age_s", op=">", value=60, for_s=0)


def book(*alerts: Alert) -> AlertBook:
    return AlertBook(alerts, now=0.0)


def rounds(alert: Alert, values: list[float | None], field: str = "loss") -> list[tuple[int, bool]]:
    """Rounds after which an alert is told, with whether it is over; round n ends at n seconds."""
    alerts = book(alert)
    told = []
    for number, value in enumerate(values):
        for notice in alerts.add_record({"kind": "round", "round": number, field: value}, float(number)):
            told.append((number, notice.is_over))
    return told


@pytest.mark.parametrize(
    ("op", "bad", "well"), [(">", 5.1, 5.0), (">=", 5.0, 4.9), ("<", 4.9, 5.0), ("<=", 5.0, 5.1), (">", math.inf, 5.0)]
)
def test_alert_is_told_once_and_again_only_after_its_metric_was_well(op: Any, bad: float, well: float) -> None:
    alert = Alert(metric="loss", op=op, value=5.0, for_rounds=1)
    told = rounds(alert, [well, bad, bad, bad, well, well, bad, bad])
    assert told == [(1, False), (4, True), (6, False)]


def test_condition_has_to_hold_for_rounds_in_a_row() -> None:
    alert = Alert(metric="loss", op=">", value=5.0, for_rounds=3)
    assert rounds(alert, [9, 9, 1, 9, 9, 9, 9, 1]) == [(5, False), (7, True)]
    assert rounds(alert, [9, None, 9]) == [(2, False)], "a record without the value changes nothing"


def test_condition_has_to_hold_for_seconds_by_the_clock_between_records_too() -> None:
    alerts = book(Alert(metric="loss", op=">", value=5.0, for_s=10))
    assert alerts.add_record({"kind": "round", "round": 0, "loss": 9.0}, 100.0) == []
    assert alerts.look(109.9) == []
    (notice,) = alerts.look(110.0)
    assert (notice.value, notice.round, notice.is_over) == (9.0, 0, False)


def test_value_that_is_no_number_meets_every_condition() -> None:
    for op in (">", "<", "above_median_times"):
        alert = Alert(metric="loss", op=op, value=5.0, for_rounds=1)
        assert rounds(alert, [math.nan, 5.0]) == [(0, False), (1, True)]


def test_median_is_that_of_values_that_were_well() -> None:
    alert = Alert(metric="loss", op="above_median_times", value=2, for_rounds=1)
    assert rounds(alert, [9.0, 1.0, 1.0, 1.0, 9.0]) == [], "five values come first"
    steady = [3.0, 1.0, 1.0, 1.0, 1.0, 1.9]
    assert rounds(alert, [*steady, *[2.1] * 50, 1.9, 2.1]) == [(6, False), (56, True), (57, False)]
    assert rounds(alert, [-1.0] * 5 + [-0.1, 9.0]) == [], "a median of 0 or less has no multiple"
    assert rounds(alert, [math.inf] * 5 + [1.0] * 5 + [9.0]) == [(10, False)], "infinity is no value of a median"
    below = Alert(metric="goodput", op="below_median_times", value=0.5, for_rounds=1)
    assert rounds(below, [0.8] * 5 + [0.41, 0.39], "goodput") == [(6, False)]


def test_median_forgets_all_but_twenty_values() -> None:
    alert = Alert(metric="loss", op="above_median_times", value=2, for_rounds=1)
    assert rounds(alert, [9.0] * 30 + [1.0] * 11 + [2.1]) == [(41, False)]


def test_age_of_the_last_commit_is_told_though_no_record_comes_and_once() -> None:
    alerts = book(AGE)
    told = [(second, notice.is_over) for second in range(200) for notice in alerts.look(float(second))]
    assert told == [(61, False)]
    (over,) = alerts.add_event({"kind": "commit"}, 200.0)
    assert over.is_over and over.value == 0.0
    assert [second for second in range(200, 400) if alerts.look(float(second))] == [261]


def test_evaluation_holds_until_the_next_one() -> None:
    alerts = book(Alert(metric="val_loss", op=">", value=2.0, for_rounds=3))
    told = []
    for number in range(8):
        if number in (1, 6):
            alerts.add_record({"kind": "eval", "round": number, "val_loss": 3.0 if number == 1 else 1.0}, 0.0)
        told += [number for _ in alerts.add_record({"kind": "round", "round": number}, 0.0)]
    assert told == [3]


def report(worker: int, norm: float) -> dict[str, Any]:
    return {"kind": "step", "worker": worker, "round": 0, "gradient_norm": norm}


def test_report_of_one_worker_is_enough_and_a_lost_worker_is_forgotten() -> None:
    alerts = book(Alert(metric="gradient_norm", op=">", value=10, for_s=5))
    assert [alerts.add_record(report(0, 1.0), at) + alerts.add_record(report(1, 99.0), at) for at in (0.0, 4.9)] == [
        []
    ] * 2
    (notice,) = alerts.add_record(report(1, 98.0), 5.0)
    assert (notice.worker, notice.value) == (1, 98.0)
    assert alerts.add_record(report(0, 1.0), 6.0) == []
    assert alerts.add_event({"kind": "loss", "worker": 1}, 7.0) == []
    (over,) = alerts.add_record(report(0, 1.0), 8.0)
    assert over.is_over and over.worker == 0


def test_workers_are_counted_from_the_first_plan_on() -> None:
    alerts = book(Alert(metric="workers", op="<", value=2, for_s=0))
    for event in ({"kind": "join", "worker": 0}, {"kind": "join", "worker": 1}):
        assert alerts.add_event(event, 0.0) == []
    assert alerts.look(30.0) == [] and alerts.add_event({"kind": "plan"}, 31.0) == []
    (notice,) = alerts.add_event({"kind": "loss", "worker": 0}, 40.0)
    assert (notice.value, notice.limit) == (1.0, 2.0)
    assert alerts.add_event({"kind": "leave", "worker": 1}, 41.0) == []
    alerts.add_event({"kind": "join", "worker": 0}, 50.0)
    (over,) = alerts.add_event({"kind": "join", "worker": 2}, 51.0)
    assert over.is_over and over.value == 2.0


def test_share_of_the_fleets_time_is_a_metric() -> None:
    alerts = book(Alert(metric="time_shares/loss", op=">", value=0.2, for_rounds=1))
    assert alerts.add_record({"kind": "round", "round": 0, "time_shares": None}, 0.0) == []
    (notice,) = alerts.add_record({"kind": "round", "round": 1, "time_shares": {"loss": 0.25}}, 0.0)
    assert notice.value == 0.25


@pytest.mark.parametrize(
    ("notice", "text"),
    [
        (Notice(AGE, False, 61.25, 60.0, 11, None), "commit_age_s is 61.25, above 60, after round 12"),
        (Notice(AGE, True, 0.0, 60.0, None, None), "commit_age_s is 0"),
        (
            Notice(Alert(metric="loss", op="above_median_times", value=2, name="jump"), False, 5, 4, 0, None),
            "jump: loss is 5, above 4, 2 times the median, after round 1",
        ),
        (
            Notice(Alert(metric="gradient_norm", op=">=", value=9, message="look"), False, math.nan, 9, None, 3),
            "look: gradient_norm of worker 3 is nan, at least 9",
        ),
    ],
)
def test_text_has_value_limit_and_round_as_people_count_it(notice: Notice, text: str) -> None:
    if math.isnan(notice.value):
        text = text.replace(", at least 9", "")
    assert notice.text == text


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_next_attempt_counts_rounds_before_it_and_tells_nothing_twice(tmp_path: Path) -> None:
    loss = Alert(metric="loss", op=">", value=5.0, for_rounds=3)
    goodput = Alert(metric="goodput", op="<", value=0.5, for_rounds=2)
    losses = [{"kind": "round", "round": number, "loss": 9.0, "goodput": 0.1} for number in range(2)]
    write(tmp_path / "metrics.jsonl", losses)
    told = {"kind": "alert", "alert": goodput.title}
    write(tmp_path / "events.jsonl", [told, {"kind": "alert_over", "alert": goodput.title}, told])
    alerts = book(loss, goodput)
    alerts.recall(tmp_path, 0.0)
    assert alerts.look(1.0) == []
    (notice,) = alerts.add_record({"kind": "round", "round": 2, "loss": 9.0, "goodput": 0.1}, 2.0)
    assert notice.alert == loss
    (over,) = alerts.add_record({"kind": "round", "round": 3, "loss": 9.0, "goodput": 0.9}, 3.0)
    assert over.alert == goodput and over.is_over


def test_alert_of_a_round_that_is_not_in_the_files_is_not_over_before_a_value_is_well(tmp_path: Path) -> None:
    loss = Alert(metric="loss", op=">", value=5.0, for_rounds=1)
    # Files have null for NaN, and no record of a round that is trained again.
    write(tmp_path / "metrics.jsonl", [{"kind": "round", "round": n, "loss": None if n else 1.0} for n in range(2)])
    write(tmp_path / "events.jsonl", [{"kind": "alert", "alert": loss.title}])
    alerts = book(loss)
    alerts.recall(tmp_path, 0.0)
    assert alerts.look(1.0) == []
    assert alerts.add_record({"kind": "round", "round": 2, "loss": 9.0}, 2.0) == []
    (over,) = alerts.add_record({"kind": "round", "round": 3, "loss": 2.0}, 3.0)
    assert over.is_over and over.value == 2.0


def test_attempt_after_one_that_stood_still_is_not_well_before_its_first_commit(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [{"kind": "alert", "alert": AGE.title}])
    alerts = book(AGE)
    alerts.recall(tmp_path, 0.0)
    assert [notice for second in range(300) for notice in alerts.look(float(second))] == []
    (over,) = alerts.add_event({"kind": "commit"}, 300.0)
    assert over.is_over
