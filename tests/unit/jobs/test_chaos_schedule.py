"""When jobs/chaos.py strikes at what: by a seed, at random or evenly."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from statistics import mean, pstdev

import pytest
from chaoslab.options import ROLES, Options
from chaoslab.schedule import STOPPABLE, Strike, planned

from hypha_ray.errors import ConfigError

ROUND_S = 10.0


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
