"""What jobs/chaos.py takes for progress after a kill, and what it sees of a run's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaoslab.figures.recovery import Kill, Seen, figures, newest, percentile, progress_at
from chaoslab.watch import Tail, Watch


def event(at_s: float, kind: str, **fields: Any) -> Seen:
    return Seen(at_s, {"kind": kind, **fields})


def step(at_s: float, worker: int) -> Seen:
    return Seen(at_s, {"kind": "step", "worker": worker})


def kill(role: str, worker: int | None = None, after: int = 0) -> Kill:
    return Kill(100.0, role, role, "SIGKILL", 1, worker, after)


EVENTS = [
    event(1, "attempt", attempt=1),
    event(2, "join", worker=0, incarnation=10001),
    event(2, "join", worker=1, incarnation=10002),
]


@pytest.mark.parametrize("role", ["worker", "node"])
def test_worker_is_back_with_the_first_step_of_its_successor(role: str) -> None:
    late_word = event(100.1, "join", worker=1, incarnation=10002)
    events = [*EVENTS, late_word, event(101, "hire", worker=0, incarnation=10003)]
    steps = [step(99, 1), step(100.1, 1), step(101.5, 0)]
    assert progress_at(kill(role, 1, 10002), steps, events, [101]) is None
    events += [event(104, "hire", worker=1, incarnation=10004)]
    assert progress_at(kill(role, 1, 10002), steps, events, [101]) is None
    steps += [step(108, 0), step(109, 1), step(110, 1)]
    assert progress_at(kill(role, 1, 10002), steps, events, [101]) == 109


@pytest.mark.parametrize("role", ["scheduler", "driver"])
def test_scheduler_is_back_with_the_first_step_of_the_next_attempt(role: str) -> None:
    steps = [step(100.1, 1), step(107, 0), step(108, 0)]
    assert progress_at(kill(role, after=1), steps, EVENTS, [105]) is None
    events = [*EVENTS, event(105, "attempt", attempt=2)]
    assert progress_at(kill(role, after=1), steps, events, [105]) == 107
    assert progress_at(kill(role, after=2), steps, events, [105]) is None


@pytest.mark.parametrize("role", ["server", "shard", "store", "telemetry"])
def test_others_are_back_with_the_next_commit(role: str) -> None:
    assert progress_at(kill(role), [step(101, 0)], EVENTS, [90, 100]) is None
    assert progress_at(kill(role), [], [], [90, 100, 104, 103]) == 103


def test_newest_is_that_of_the_worker_or_of_the_attempt_and_zero_for_others() -> None:
    assert newest(EVENTS, "worker", 0) == 10001
    assert newest(EVENTS, "node", 1) == 10002
    assert newest(EVENTS, "driver", None) == 1
    assert newest(EVENTS, "shard", None) == 0
    assert newest([], "worker", 0) == 0


def test_percentiles_are_values_that_were_there_and_never_too_small() -> None:
    values = [float(number) for number in range(10, 0, -1)]
    assert [percentile(values, part) for part in (0.0, 0.5, 0.51, 0.95, 1.0)] == [1, 5, 6, 10, 10]
    assert percentile([float(number) for number in range(1, 21)], 0.95) == 19


def test_figures_count_what_never_healed_and_leave_it_out_of_the_times() -> None:
    assert figures([3.0, None, 1.0]) == {"healed": 2, "not_healed": 1, "p50_s": 1.0, "p95_s": 3.0, "max_s": 3.0}
    assert figures([None])["p95_s"] is None


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_tail_takes_whole_lines_once_and_passes_torn_ones_over(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.new() == []
    append(path, '{"a": 1}\n{"a": 2')
    assert tail.new() == [{"a": 1}]
    append(path, '}\n{"a"\n[1]\n')
    assert tail.new() == [{"a": 2}]
    assert tail.new() == []


def test_tail_of_a_file_that_was_replaced_takes_only_what_is_new(tmp_path: Path) -> None:
    path, draft = tmp_path / "lines", tmp_path / "draft"
    tail = Tail(path)
    append(path, '{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    assert len(tail.new()) == 3
    draft.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    draft.replace(path)
    assert tail.new() == [{"a": 4}]


def test_watch_sees_steps_events_and_commits_and_which_were_taken_back(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.look(1.0)
    commits = tmp_path / "commits"
    commits.mkdir()
    for number in range(3):
        (commits / f"round_{number:06d}.json").write_text(json.dumps({"round": number}))
    (commits / "round_000003.abc.tmp").write_text("unfinished")
    append(tmp_path / "metrics.jsonl", '{"kind": "step", "round": 3}\n{"kind": "round", "round": 2}\n')
    append(tmp_path / "events.jsonl", '{"kind": "plan", "round": 1}\n{"kind": "plan", "round": 1, "again": 1}\n')
    watch.look(2.0)
    watch.look(3.0)
    assert watch.commits == {0: 2.0, 1: 2.0, 2: 2.0}
    assert watch.steps == [Seen(2.0, {"kind": "step", "round": 3})]
    assert watch.begun() == [1, 1, 3]
    assert watch.taken_back() == []
    (commits / "round_000002.json").unlink()
    (commits / "round_000001.json").write_text("other")
    assert sorted(watch.taken_back()) == [1, 2]
