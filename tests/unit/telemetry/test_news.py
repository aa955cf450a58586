"""News of a run: what happens to the fleet is a line each, and never a flood."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pytest

from hypha_ray.driver.launch import watch
from hypha_ray.telemetry.news import News
from hypha_ray.telemetry.sinks.console import Console


def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "monotonic_s": at, **fields}


def loss(worker: int, at: float, reason: str = "killed") -> dict[str, Any]:
    return event("loss", at, worker=worker, incarnation=1, reason=reason)


def join(worker: int, at: float) -> dict[str, Any]:
    return event("join", at, worker=worker, incarnation=1, device="cpu")


def plan(at: float) -> dict[str, Any]:
    return event("plan", at, round=0, batches={0: 3}, predicted_s=None)


def told(events: Iterable[dict[str, Any]], until: float, begun: bool = True) -> list[tuple[float, str]]:
    """The lines of a run whose scheduler looks after every event, and ten times a second; with their times."""
    news, lines = News(), []
    if begun:
        news.add_event(plan(0.0))
    waiting = sorted(events, key=lambda one: one["monotonic_s"])
    for tenth in range(int(until * 10) + 1):
        now = tenth / 10
        while waiting and waiting[0]["monotonic_s"] <= now:
            news.add_event(waiting.pop(0))
            lines += [(now, line) for line in news.lines(now)]
        lines += [(now, line) for line in news.lines(now)]
    return lines


def test_a_round_with_fewer_workers_than_wanted_is_told_once_for_each_number() -> None:
    news, lines = News(3), []
    happened = [join(0, 1.0), join(1, 1.0), plan(2.0), plan(3.0), loss(1, 4.0), plan(9.0), join(1, 10.0), join(2, 10.5)]
    for one in [*happened, plan(20.0), plan(21.0)]:
        news.add_event(one)
        lines += [line for line in news.lines(one["monotonic_s"], True) if "trains with" in line]
    rest = "further ones join when there are machines for them"
    assert lines == [f"trains with 2 of 3 workers; {rest}", f"trains with 1 of 3 workers; {rest}"]


def test_fleet_of_wanted_size_is_told_by_joins_alone() -> None:
    news = News(1)
    for one in (join(0, 1.0), plan(2.0), plan(3.0)):
        news.add_event(one)
    assert news.lines(3.0, True) == ["worker 0 joined: cpu"]


@pytest.mark.parametrize(
    ("workers", "line"),
    [
        ([], "machine rack-1 (10.0.0.5) is gone: no worker of this run was on it"),
        ([3], "machine rack-1 (10.0.0.5) is gone: 1 worker (3) was on it"),
        ([4, 3, 7], "machine rack-1 (10.0.0.5) is gone: 3 workers (3-4, 7) were on it"),
    ],
)
def test_machine_that_is_gone_is_told_with_its_workers(workers: list[int], line: str) -> None:
    lost = event("machine_loss", 1.0, machine="rack-1 (10.0.0.5)", workers=workers)
    assert told([lost], 2.0) == [(1.0, line)]


@pytest.mark.parametrize(
    ("happened", "line"),
    [
        (join(3, 1.0), "worker 3 joined: cpu"),
        (loss(3, 1.0, "its node died"), "worker 3 was lost: its node died"),
        (event("leaving", 1.0, worker=3, incarnation=1, reason="preempted"), "worker 3 is leaving: preempted"),
        (event("leave", 1.0, worker=3, incarnation=1, reason="left"), "worker 3 left"),
        (
            event("exclude", 1.0, worker=3, strikes=2),
            "worker 3 is excluded from here on: 2 of its deltas were rejected",
        ),
        (
            event("exclude", 1.0, worker=3, reason="another model"),
            "worker 3 is excluded from here on: another model",
        ),
        (event("revive", 1.0, role="server-0", reason="silent for 5 s"), "server-0 was replaced: silent for 5 s"),
        (
            event("waiting", 1.0, workers=1, needed=4),
            "waiting for workers: 1 of the 4 that are needed are there",
        ),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_what_happens_to_the_fleet_is_one_line_at_once(happened: dict[str, Any], line: str) -> None:
    assert told([happened], 30) == [(1.0, line)]


@pytest.mark.parametrize("kind", ["plan", "correction", "commit", "stale", "hire", "lease", "arrival", "reject"])
def test_what_happens_all_the_time_is_no_news(kind: str) -> None:
    assert told([event(kind, 1.0, worker=0, round=1)], 30) == []


def test_thousand_joins_at_a_start_are_one_line() -> None:
    joins = [join(number, 1 + number / 200) for number in range(1000)]
    assert told([*joins, plan(6.5)], 60, begun=False) == [(6.5, "1000 workers joined (0-999): cpu")]


def test_joins_of_a_start_that_takes_long_are_told_before_its_end() -> None:
    lines = told([join(0, 1), join(1, 2), join(2, 40), plan(90)], 100, begun=False)
    assert lines == [(31.0, "2 workers joined (0-1): cpu"), (40.0, "worker 2 joined: cpu")]


def test_losses_before_the_first_round_are_told_at_once_after_the_joins_before_them() -> None:
    lines = told([join(0, 1), join(1, 1), loss(1, 2)], 3, begun=False)
    assert lines == [(2.0, "2 workers joined (0-1): cpu"), (2.0, "worker 1 was lost: killed")]


def test_thousand_workers_that_come_and_go_for_a_minute_are_a_few_lines() -> None:
    events = [make(number, number * 0.06) for number in range(1000) for make in (loss, join)]
    lines = told(events, 70)
    assert len(lines) <= 2 * (70 / 5 + 1)
    assert lines[0] == (0.0, "worker 0 was lost: killed")
    assert all("loss" not in line for _, line in lines)


def test_every_worker_is_in_exactly_one_line() -> None:
    events = [loss(number, number * 0.5) for number in range(60)]
    counts = [1 if text.startswith("worker") else int(text.split()[0]) for _, text in told(events, 60)]
    assert sum(counts) == 60


def test_many_losses_together_name_the_workers_and_the_first_reason() -> None:
    news = News()
    assert news.lines(0.0) == []
    for worker, reason in ((7, "node a died"), (2, "node a died"), (3, "node b died"), (4, "node a died")):
        news.add_event(loss(worker, 1.0, reason))
    assert news.lines(1.0) == ["4 workers were lost (2-4, 7), the first: node a died"]


def test_worker_that_is_lost_again_and_again_says_how_often() -> None:
    lines = told([loss(0, 1.0 + number / 2) for number in range(5)], 20)
    assert lines == [(1.0, "worker 0 was lost: killed"), (6.0, "worker 0 was lost 4 times: killed")]


def test_excluded_worker_is_not_told_to_be_lost_as_well() -> None:
    excluded = event("exclude", 1.0, worker=1, strikes=3)
    events = [excluded, loss(1, 1.0, "excluded after 3 rejected deltas"), loss(2, 1.0)]
    assert [text for _, text in told(events, 20)] == [
        "worker 1 is excluded from here on: 3 of its deltas were rejected",
        "worker 2 was lost: killed",
    ]


def test_problem_is_told_at_once_and_only_once() -> None:
    events = [event("problem", 1.0 + number, text=text) for number, text in enumerate(("full", "full", "empty"))]
    assert told(events, 20) == [(1.0, "full"), (3.0, "empty")]


def test_flood_of_problems_is_a_few_lines_and_a_number() -> None:
    events = [event("problem", number * 0.01, text=f"sample {number}") for number in range(3000)]
    lines = told(events, 60)
    assert [text for _, text in lines[:5]] == [f"sample {number}" for number in range(5)]
    numbers = [int(text.split()[0]) for _, text in lines if "more problems, see events.jsonl" in text]
    singles = [text for _, text in lines if text.startswith("sample ")]
    assert len(lines) < 60 and sum(numbers) + len(singles) == 3000


def test_everything_that_waits_is_told_at_the_end() -> None:
    news = News()
    news.add_event(join(0, 1.0))
    assert news.lines(1.0) == []
    assert news.lines(1.5, everything=True) == ["worker 0 joined: cpu"]
    assert news.lines(1.5, everything=True) == []


def test_reason_from_outside_is_one_short_line_without_control_characters() -> None:
    ((_, text),) = told([loss(0, 1.0, "\x1b[2J first\nsecond\r" + "x" * 5000)], 2)
    assert text.startswith("worker 0 was lost: [2J first second xxx")
    assert text.isprintable() and len(text) < 250


def test_many_names_and_ranges_are_cut_short() -> None:
    news = News()
    for number in range(0, 100, 2):
        news.add_event(loss(number, 1.0))
    assert news.lines(1.0) == ["50 workers were lost (0, 2, 4, 6, 8, 10, 12, 14, …): killed"]
    for number in range(20):
        news.add_event(event("revive", 1.0, role=f"server-{number:02d}", reason="gone"))
    (line,) = news.lines(1.0)
    assert line.startswith("20 actors were replaced (server-00, server-01, ") and line.endswith("server-07, …): gone")


@pytest.mark.parametrize("interactive", [False, True])
def test_driver_shows_news_with_and_without_a_terminal(interactive: bool, caplog: pytest.LogCaptureFixture) -> None:
    stream, text = io.StringIO(), "worker 3 was lost: its node died"
    with caplog.at_level("INFO", "hypha_ray"):
        watch(iter([{"kind": "news", "text": text}]), Console(3, stream, interactive=interactive))
    assert f"-- {text}\n" in stream.getvalue().replace("\r", "")
    assert caplog.messages == [text]
