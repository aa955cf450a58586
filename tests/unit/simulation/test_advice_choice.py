"""Choice of an exchange's settings for models, fleets and links."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hypha_ray.simulation.exchange import Circumstances, ExchangeSettings, Link, ModelShape, encoded_bytes, estimate
from hypha_ray.simulation.ladder import ExchangeChoice, Limits, choose, most_fragments, sufficient_scale

ALL = Limits(total_steps=100_000, overlaps=True, encodes_weights=True)
BITS = ("huffman2", "int4", "int8", "bf16", "fp32")
"""Codecs from the fewest bits to the most."""


def circumstances(
    parameters: float, mbps: float, head_mbps: float | None = None, workers: int = 8, batch_s: float = 1.0,
    layers: int = 24, latency_s: float = 0.02,
) -> Circumstances:  # fmt: skip
    link = Link(mbps, mbps, latency_s)
    head = Link(head_mbps or mbps, head_mbps or mbps, latency_s)
    return Circumstances(ModelShape(int(parameters), layers), (batch_s,) * workers, link, head)


def chosen(case: Circumstances, limits: Limits = ALL) -> ExchangeChoice:
    return choose(case, limits, 0.1)


def test_tiny_model_in_a_fast_network_is_exchanged_often_and_plainly() -> None:
    choice = chosen(circumstances(0.48e6, 10_000, workers=2, batch_s=0.05, layers=2, latency_s=1e-4))
    assert choice.suffices
    assert choice.settings == ExchangeSettings("fp32", "fp32", 10)


def test_billion_parameters_at_home_are_exchanged_rarely_in_few_bits_behind_training() -> None:
    choice = chosen(circumstances(1.1e9, 20, head_mbps=10_000))
    assert choice.suffices
    assert choice.settings.codec == "int4"
    assert choice.settings.steps >= 500
    assert choice.settings.fragments == 8
    assert choice.settings.lateness > 0


def test_intellect_1_between_american_sites_is_advised_as_it_was_trained() -> None:
    """INTELLECT-1: 10 billion parameters, 14 nodes, H = 100 and 8 bits; 38 minutes of training, then 103 s."""
    case = circumstances(10e9, 1550, head_mbps=25_000, workers=14, batch_s=22.8, layers=42)
    choice = chosen(case)
    assert choice.settings == ExchangeSettings("int8", "int8", 100)
    on_links_s = choice.estimate.up_s + choice.estimate.down_s
    assert on_links_s == pytest.approx(103, rel=0.05)  # 20.3 GB at 1.55 Gbit/s take 105 s.


def test_streaming_diloco_at_a_gigabit_is_advised_near_its_settings() -> None:
    """Streaming DiLoCo: a billion parameters, two replicas, H = 100, fragments, a delay of a few steps."""
    choice = chosen(circumstances(1e9, 1000, workers=2))
    assert choice.settings.steps == 100
    assert choice.settings.fragments in (4, 8)
    assert 1 <= choice.settings.delay_steps <= 10


def test_link_in_another_direction_is_another_bottleneck() -> None:
    settings = ExchangeSettings("fp32", "fp32", 100)
    narrow_up = Circumstances(ModelShape(10_000_000), (1.0, 1.0), Link(1000, 10), Link(1000, 1000))
    figures = estimate(settings, narrow_up)
    assert figures.up_s == pytest.approx(32)  # 40 MB at 10 Mbit/s
    assert figures.down_s == pytest.approx(0.64)  # 80 MB at 1 Gbit/s: the head sends two of them.


def test_estimate_by_hand() -> None:
    """Two fragments of 2 MB, 16 bits: 4 s up and 2 s down, a delay of two batches, rounds of ten."""
    link = Link(8, 4, 0.05)
    head = Link(1000, 1000, 0.05)
    case = Circumstances(ModelShape(2_000_000), (1.0,), link, head)
    figures = estimate(ExchangeSettings("bf16", "bf16", 20, fragments=2, delay_steps=2), case)
    assert figures.up_s == pytest.approx(4.0)
    assert figures.down_s == pytest.approx(2.0)
    assert figures.latency_s == pytest.approx(0.2)
    assert figures.train_s == pytest.approx(10.0)
    assert figures.wait_s == pytest.approx(figures.exchange_s - 2)
    assert figures.overhead == pytest.approx(figures.wait_s / (10 + figures.wait_s))
    assert figures.worker_bytes == 4_000_000


def test_wait_is_the_mean_over_unequal_fragments() -> None:
    shape = ModelShape(4_000_000, 6, {2: (3_000_000, 1_000_000)})
    case = Circumstances(shape, (1.0,), Link(32, 32), Link(32, 32))
    figures = estimate(ExchangeSettings("fp32", "fp32", 20, fragments=2), case)
    assert figures.up_s == pytest.approx(3.0)
    assert figures.wait_s == pytest.approx(4.0, rel=0.01)  # 6 s and 2 s
    assert figures.worker_bytes == 16_000_000


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [0.1e6, 10e6, 150e6, 1.1e9, 10e9])
@pytest.mark.parametrize("workers", [1, 2, 8, 64])
@pytest.mark.parametrize("batch_s", [0.05, 1.0, 20.0])
@pytest.mark.parametrize(
    "limits", [ALL, Limits(640, True, True), Limits(100_000, False, True), Limits(90, True, False)]
)
def test_slower_link_never_shortens_rounds_or_takes_more_bits(
    parameters: float, workers: int, batch_s: float, limits: Limits
) -> None:
    rates = [100_000, 10_000, 3000, 1000, 300, 100, 50, 20, 10, 5, 1]
    cases = [circumstances(parameters, rate, workers=workers, batch_s=batch_s) for rate in rates]
    choices = [chosen(case, limits) for case in cases]
    for faster, slower in pairwise(choices):
        assert slower.settings.steps >= faster.settings.steps
        assert BITS.index(slower.settings.codec) <= BITS.index(faster.settings.codec)
        assert slower.settings.fragments >= faster.settings.fragments
        assert faster.suffices or not slower.suffices


@pytest.mark.parametrize("mbps", [5, 20, 100, 1000, 10_000])
@pytest.mark.parametrize("parameters", [0.5e6, 150e6, 7e9])
@pytest.mark.parametrize("total_steps", [1, 50, 640, 100_000])
def test_settings_keep_their_limits(mbps: float, parameters: float, total_steps: int) -> None:
    limits = Limits(total_steps, True, True)
    choice = chosen(circumstances(parameters, mbps), limits)
    settings = choice.settings
    assert settings.steps % settings.fragments == 0
    assert settings.delay_steps < settings.round_steps
    assert settings.in_flight <= settings.fragments
    assert settings.lateness <= 0.25 * settings.steps
    assert settings.round_steps <= max(1, total_steps // 10)
    assert choice.suffices == (choice.estimate.overhead <= 0.1)


def test_without_overlap_no_fragments_are_proposed() -> None:
    choice = chosen(circumstances(1.1e9, 20), Limits(100_000, False, False))
    assert choice.settings.fragments == 1
    assert choice.settings.delay_steps == 0
    assert choice.settings.downward_codec == "fp32"


@pytest.mark.parametrize(
    ("layers", "fragments"), [(1, 1), (5, 1), (6, 2), (12, 4), (23, 4), (24, 8), (96, 8), (None, 8)]
)
def test_fragments_have_three_layers_or_more(layers: int | None, fragments: int) -> None:
    assert most_fragments(ModelShape(1_000_000, layers)) == fragments


def test_hopeless_link_is_told_which_rate_would_do() -> None:
    case = circumstances(10e9, 1, workers=4)
    choice = chosen(case)
    assert not choice.suffices
    factor = sufficient_scale(case, ALL, 0.1)
    assert factor is not None
    enough = circumstances(10e9, factor, workers=4)
    assert chosen(enough).suffices
    assert not chosen(circumstances(10e9, factor / 1.02, workers=4)).suffices


def test_faster_machines_need_longer_rounds() -> None:
    slow = chosen(circumstances(150e6, 100, batch_s=10))
    fast = chosen(circumstances(150e6, 100, batch_s=0.1))
    assert fast.settings.steps > slow.settings.steps


def test_step_time_of_an_unequal_fleet_is_that_of_its_throughput() -> None:
    case = Circumstances(ModelShape(1000), (1.0, 0.5), Link(1, 1), Link(1, 1))
    assert case.step_s == pytest.approx(2 / 3)  # Three batches in a second by two workers.
    assert case.unequal


def test_bits_are_in_order() -> None:
    sizes = [encoded_bytes(codec, 2**20) for codec in BITS]
    assert sizes == sorted(sizes)
