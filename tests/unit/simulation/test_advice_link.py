"""Rates and latencies of a command line."""

from __future__ import annotations

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.simulation.exchange import Link, parse_latency, parse_link, rate_text


@pytest.mark.parametrize(
    ("text", "down", "up"),
    [
        ("100mbit", 100, 100),
        ("1gbit", 1000, 1000),
        ("1.5Gbit", 1500, 1500),
        ("100 Mbit/s", 100, 100),
        ("100Mbps", 100, 100),
        ("500kbit", 0.5, 0.5),
        ("2.5e2mbit", 250, 250),
        ("50mbit/5mbit", 50, 5),
        ("1gbit/s / 500mbit/s", 1000, 500),
        ("50/5mbit", 50, 5),
    ],
)
def test_link_in_each_unit_is_megabits_per_second(text: str, down: float, up: float) -> None:
    link = parse_link(text, "--link")
    assert (link.down_mbps, link.up_mbps) == pytest.approx((down, up))


@pytest.mark.parametrize(
    "text", ["", "100", "mbit", "100 potatoes", "-5mbit", "1gbit/", "1/2/3mbit", "inf mbit", "50mbit/5"]
)
def test_link_that_is_no_rate_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_link(text, "--link")
    assert caught.value.code == "CFG015"
    assert "100mbit, 1gbit or 50mbit/5mbit" in str(caught.value)


@pytest.mark.parametrize(("text", "bits"), [("100MB", "800mbit"), ("1.5GB/s", "12gbit"), ("10 Mbytes", "80mbit")])
def test_link_in_bytes_is_refused_with_the_rate_in_bits(text: str, bits: str) -> None:
    with pytest.raises(ConfigError, match=f"bits, not bytes: {bits}"):
        parse_link(text, "--link")


def test_link_of_no_rate_is_out_of_range() -> None:
    with pytest.raises(ConfigError, match="CFG003"):
        parse_link("0mbit", "--link")


@pytest.mark.parametrize(
    ("text", "seconds"), [("20ms", 0.02), ("0.1 ms", 1e-4), ("150us", 150e-6), ("1s", 1), ("5MS", 0.005)]
)
def test_latency_in_each_unit_is_seconds(text: str, seconds: float) -> None:
    assert parse_latency(text, "--latency") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "code"), [("20", "CFG015"), ("20 minutes", "CFG015"), ("", "CFG015"), ("61s", "CFG003")]
)
def test_latency_that_is_none_is_refused(text: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_latency(text, "--latency")
    assert caught.value.code == code


def test_rates_are_written_in_their_units() -> None:
    assert rate_text(20) == "20 Mbit/s"
    assert rate_text(1500) == "1.5 Gbit/s"
    assert str(Link(50, 5)) == "50 Mbit/s down and 5 Mbit/s up"
