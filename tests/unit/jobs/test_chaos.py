"""Figures of jobs/chaos.py: times of strikes, faults in a commit log, work between moments, progress after kills."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest
from chaoslab.figures.audit import account, begun_again, breaks, discarded
from chaoslab.figures.efficiency import (
    Edge,
    Window,
    calm_window,
    chaos_window,
    efficiency,
    last_calm_round,
    rounds_of,
    window,
)
from chaoslab.figures.growth import settled, slope_per_hour
from chaoslab.figures.recovery import Kill, Seen, figures, newest, percentile, progress_at
from chaoslab.options import ROLES, Options
from chaoslab.samples import Samples
from chaoslab.schedule import STOPPABLE, Strike, planned
from chaoslab.watch import Tail, Watch

from hypha_ray.errors import ConfigError
from hypha_ray.types import Commit, Contribution, Span

ROUND_S = 10.0
SIZES = {0: 10, 2: 6}


def strikes(seed: int = 1, signal: str = "kill", count: int = 4000) -> list[Strike]:
    return list(islice(planned(seed, ROLES, 3.0, ROUND_S, signal, None), count))


def test_strikes_of_one_seed_are_the_same_and_of_another_are_not() -> None:
    assert strikes(7, count=50) == strikes(7, count=50)
    assert strikes(7, count=50) != strikes(8, count=50)


def test_random_strikes_have_exponential_intervals_of_the_mean_that_was_asked_for() -> None:
    intervals = [strike.after_s for strike in strikes()]
    assert mean(intervals) == pytest.approx(30, rel=0.05)
    assert pstdev(intervals) == pytest.approx(30, rel=0.1)
    assert sum(after > 30 for after in intervals) / len(intervals) == pytest.approx(0.368, abs=0.03)


def test_random_strikes_hit_all_roles_alike() -> None:
    counts = Counter(strike.role for strike in strikes())
    assert set(counts) == set(ROLES)
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_even_strikes_are_as_many_as_asked_for_and_at_every_moment_of_a_round() -> None:
    intervals = [strike.after_s for strike in planned(1, ["shard"], 4.0, ROUND_S, "kill", 200)]
    assert len(intervals) == 200
    assert 35 <= min(intervals) < 36 and 44 < max(intervals) <= 45
    assert mean(intervals) == pytest.approx(40, abs=1)


@pytest.mark.parametrize(("signal", "part"), [("kill", 0.0), ("mixed", 0.5), ("stop", 1.0)])
def test_stopping_is_for_those_who_are_watched_only(signal: str, part: float) -> None:
    done = strikes(signal=signal)
    watched = [strike.stop for strike in done if strike.role in STOPPABLE]
    assert mean(watched) == pytest.approx(part, abs=0.05)
    assert not any(strike.stop for strike in done if strike.role in ("node", "driver"))


def test_victims_are_drawn_from_the_first_to_the_last_and_nobody_where_nobody_lives() -> None:
    chosen = [Strike(1.0, "worker", False, draw).choose("abcd") for draw in (0.0, 0.26, 0.74, 0.999)]
    assert chosen == ["a", "b", "c", "d"]
    assert Strike(1.0, "worker", False, 0.5).choose([]) is None


def test_options_name_the_roles_once_and_as_many_rounds_as_even_kills_need() -> None:
    options = Options(4.0, roles="driver, node,driver", kills=10)
    options.check()
    assert options.victims == ("driver", "node")
    assert options.chaos_rounds == 52
    assert Options(4.0, rounds=7, kills=10).chaos_rounds == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(4.0, rounds=5, roles="worker,boss"), "no role 'boss'"),
        (Options(4.0), "--rounds or --kills"),
        (Options(0.0, rounds=5), "--mean-rounds-between-kills"),
        (Options(0.5, kills=5), "--mean-rounds-between-kills"),
        (Options(float("nan"), rounds=5), "--mean-rounds-between-kills"),
        (Options(4.0, rounds=0), "--rounds is out of range"),
        (Options(4.0, rounds=5, workers=0), "--workers"),
    ],
)
def test_impossible_options_are_refused_by_name(options: Options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options.check()


def commit(round: int, spans: dict[int, list[Span]], epoch: int = 0, used: dict[int, int] | None = None) -> Commit:
    return Commit(
        round=round,
        parent_sha256=None if round == 0 else f"theta-{round - 1}",
        theta_sha256=f"theta-{round}",
        outer_sha256="",
        deltas=tuple(
            Contribution(worker, 1, sum(span.samples for span in mine), 1.0) for worker, mine in spans.items()
        ),
        spans=tuple((worker, tuple(mine)) for worker, mine in spans.items()),
        cursors=used or {},
        epoch=epoch,
        ahead={},
        rejected=(),
    )


def whole_log() -> list[Commit]:
    """Three rounds: the second ends epoch 0 and begins epoch 1, which two workers share a slice in."""
    return [
        commit(0, {0: [Span(0, 0, 0, 5)], 1: [Span(0, 2, 0, 6)]}, used={0: 5, 2: 6}),
        commit(1, {0: [Span(0, 0, 5, 10), Span(1, 2, 0, 2)]}, epoch=1, used={2: 2}),
        commit(2, {0: [Span(1, 2, 4, 6)], 1: [Span(1, 2, 2, 4)]}, epoch=1, used={2: 6}),
    ]


def losses(log: list[Commit]) -> tuple[int, int, int]:
    found = account(log, SIZES)
    return found.lost, found.repeated, found.foreign


def with_spans(log: list[Commit], at: int, spans: dict[int, list[Span]]) -> list[Commit]:
    """The log with other spans in one record, and deltas to match; its own count stays."""
    changed = commit(at, spans, log[at].epoch, log[at].cursors)
    return [*log[:at], changed, *log[at + 1 :]]


def test_whole_log_has_nothing_lost_repeated_or_foreign() -> None:
    found = account(whole_log(), SIZES)
    assert (found.committed, found.whole_epochs) == (22, 1)
    assert losses(whole_log()) == (0, 0, 0)
    assert losses([]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("number", "spans", "expected"),
    [
        (1, {0: [Span(0, 0, 4, 10), Span(1, 2, 0, 2)]}, (0, 1, 0)),
        (2, {0: [Span(1, 2, 3, 6)], 1: [Span(1, 2, 2, 4)]}, (0, 1, 0)),
        (1, {0: [Span(0, 0, 7, 10), Span(1, 2, 0, 2)]}, (2, 0, 0)),
        (0, {0: [Span(0, 0, 0, 5)]}, (6, 0, 0)),
        (2, {0: [Span(1, 2, 4, 6)]}, (2, 0, 0)),
    ],
    ids=[
        "in two deltas of an epoch",
        "in two deltas of a round",
        "gap in a complete epoch",
        "slice that a complete epoch never used",
        "counted as used, and in no delta",
    ],
)
def test_samples_that_are_repeated_or_lost_are_counted(
    number: int, spans: dict[int, list[Span]], expected: tuple[int, int, int]
) -> None:
    assert losses(with_spans(whole_log(), number, spans)) == expected


def test_sample_that_a_newer_epoch_counts_and_no_delta_has_is_lost() -> None:
    log = whole_log()
    log[-1] = replace(log[-1], ahead={2: {0: 3}})
    assert losses(log) == (3, 0, 0)


def test_samples_beyond_the_dataset_are_foreign() -> None:
    log = whole_log()
    log[1] = replace(log[1], spans=((0, (*log[1].spans[0][1], Span(0, 0, 10, 12), Span(0, 1, 0, 4))),))
    log[1] = replace(log[1], deltas=(replace(log[1].deltas[0], samples=13),))
    assert losses(log) == (0, 0, 6)


def test_delta_that_counts_other_samples_than_it_names_is_foreign() -> None:
    log = whole_log()
    log[0] = replace(log[0], deltas=(replace(log[0].deltas[0], samples=8), log[0].deltas[1]))
    assert losses(log) == (0, 0, 3)


def test_spans_of_a_worker_without_a_delta_are_foreign() -> None:
    log = whole_log()
    log[0] = replace(log[0], deltas=log[0].deltas[:1])
    assert losses(log) == (0, 0, 6)


def test_chain_breaks_where_a_record_is_missing_or_has_another_parent() -> None:
    log = whole_log()
    assert breaks(log) == 0
    assert breaks([log[0], log[2]]) == 1
    assert breaks(log[1:]) == 1
    assert breaks([log[0], replace(log[1], parent_sha256="other"), log[2]]) == 1
    assert breaks([log[0], replace(log[1], theta_sha256="other"), log[2]]) == 1


def test_rounds_begun_and_never_committed_are_discarded_but_not_what_follows_the_last() -> None:
    assert discarded([0, 1, 1, 2, 3], [0, 1, 2], rounds=3) == []
    assert discarded([0, 1, 2, 3], [0, 2], rounds=4) == [1, 3]
    assert begun_again([0, 1, 1, 1, 2]) == 2


def edges(times: list[float], samples: int = 80) -> list[Edge]:
    return [Edge(number, at, samples) for number, at in enumerate(times)]


def test_window_holds_whole_rounds_and_their_whole_time() -> None:
    found = window([Edge(0, 10, 999), Edge(1, 12, 80), Edge(2, 16, 40)], 1, 2)
    assert found is not None
    assert (found.begin_s, found.end_s, found.rounds, found.samples) == (10, 16, 2, 120)
    assert found.round_s == 3
    assert found.steps_per_s(8) == 120 / 8 / 6
    assert found.deviation == pytest.approx(sqrt(2) / 3)


def test_window_without_its_first_edge_or_a_whole_round_is_none() -> None:
    assert window(edges([1, 2, 3])[1:], 1, 2) is None
    assert window(edges([1, 2, 3]), 3, 5) is None
    assert window(edges([1, 2, 3]), 2, 5) == Window(2, 3, 1, 80, 0.0)


def test_calm_and_chaos_leave_out_the_start_and_the_first_round_of_kills() -> None:
    # Rounds 0 and 1 warm up, 2 … 4 are calm, 5 runs in, 6 and 7 are under kills; 8 comes after them.
    times = [50, 60, 70, 80, 90, 500, 520, 540, 9999]
    assert last_calm_round(3) == 4
    assert rounds_of(3, 2) == 8
    calm, chaos = calm_window(edges(times), 3), chaos_window(edges(times), 3, 2)
    assert calm is not None and (calm.begin_s, calm.end_s, calm.rounds) == (60, 90, 3)
    assert chaos is not None and (chaos.begin_s, chaos.end_s, chaos.rounds) == (500, 540, 2)


def test_efficiency_is_the_ratio_of_rates_and_its_error_that_of_both() -> None:
    value, error = efficiency(Window(0, 30, 3, 240, 0.3), Window(100, 200, 9, 400, 0.6))
    assert value == pytest.approx((400 / 100) / (240 / 30))
    assert error == pytest.approx(0.5 * sqrt(0.3**2 / 3 + 0.6**2 / 9))


def test_slope_is_that_of_a_straight_line_whatever_the_levels_of_the_lives() -> None:
    first = [(t, 100 + 2 * t / 3600) for t in (0, 100, 200, 400)]
    second = [(t, 30 + 2 * t / 3600) for t in (1000, 1500)]
    assert slope_per_hour([first, second]) == pytest.approx(2)
    assert slope_per_hour([[(0.0, 5.0)], []]) is None


def test_settled_life_has_lost_its_first_seconds() -> None:
    life = [(1000.0, 1.0), (1005.0, 90.0), (1060.0, 100.0), (1120.0, 101.0)]
    assert settled(life, settled_s=60) == life[2:]
    assert settled([], settled_s=60) == []


def test_growth_pools_the_lives_of_one_role_and_leaves_out_the_young() -> None:
    samples = Samples(
        memory={
            ("raylet", 1): [(t, 10 + t / 60) for t in (0.0, 60.0, 120.0)],
            ("raylet", 2): [(t, 50 + t / 60) for t in (300.0, 400.0, 520.0)],
            ("store", 3): [(0.0, 1.0), (59.0, 5.0)],
        }
    )
    assert samples.growth() == {"raylet": {"mb_per_hour": 60.0, "points": 4, "minutes": 3.0}}


def test_samples_of_this_process_have_its_memory_and_the_means_of_what_was_given() -> None:
    samples = Samples()
    for now, size in ((0.0, 4_000_000), (1.0, 6_000_000), (2.0, 2_000_000)):
        samples.take(now, {"raylet:a": os.getpid(), "raylet:b": os.getppid()}, size)
    assert samples.store_mb(0.0, 2.0) == {"mean": 4.0, "end": 2.0}
    assert samples.store_mb(5.0, 6.0) == {"mean": None, "end": None}
    assert {name for name, _ in samples.memory} == {"raylet"} and len(samples.memory) == 2
    assert all(1 < size < 100_000 for life in samples.memory.values() for _, size in life)
    assert samples.busy_cores(0.0, 0.5) is None


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
