"""Trials of a command line: settings, times, and mistakes in them."""

from __future__ import annotations

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.simulation.options import parse_duration_s, parse_trial


def test_parse_trial_settings_are_split_at_commas_before_keys_alone() -> None:
    trial = parse_trial("testing.batch_times_s=[0.2,0.4], sync.codec=int4,rounds.update_rounds = 8")
    assert trial.job == (
        ("testing.batch_times_s", "[0.2,0.4]"),
        ("sync.codec", "int4"),
        ("rounds.update_rounds", "8"),
    )
    assert trial.flags == ["--testing.batch_times_s=[0.2,0.4]", "--sync.codec=int4", "--rounds.update_rounds=8"]


def test_parse_trial_value_with_an_equals_sign_stays_whole() -> None:
    trial = parse_trial('testing.failpoints=["worker.step:1=kill@40", "worker.step:0=kill@9"]')
    assert trial.job == (("testing.failpoints", '["worker.step:1=kill@40", "worker.step:0=kill@9"]'),)


def test_parse_trial_keys_of_machines_and_links_are_the_scenarios() -> None:
    trial = parse_trial("machines.up_mbps=50,sync.codec=int4,head.down_gbps=1,machines.0.price=2")
    assert trial.scenario == (("machines.up_mbps", "50"), ("head.down_gbps", "1"), ("machines.0.price", "2"))
    assert trial.job == (("sync.codec", "int4"),)


@pytest.mark.parametrize("text", ["", "sync.codec", "sync.codec=", "=int4", "sync.codec=int4,", ",sync.codec=int4"])
def test_parse_trial_without_key_or_value_says_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"KEY=VALUE\[,KEY=VALUE…\]") as error:
        parse_trial(text)
    assert error.value.code == "CFG015"


def test_parse_trial_repeated_key_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        parse_trial("sync.codec=int4,sync.codec=int8")
    assert error.value.code == "CFG005"


@pytest.mark.parametrize(
    ("text", "seconds"), [("6h", 21_600), ("90min", 5_400), ("1.5 h", 5_400), ("45", 45), ("45s", 45), ("2d", 172_800)]
)
def test_parse_duration_units_give_seconds(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "6 hours", "-6h", "0h", "6h30", "nan", "inf"])
def test_parse_duration_of_another_form_says_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match="a time in s, min, h or d") as error:
        parse_duration_s(text)
    assert error.value.code == "CFG003"
