"""Exchanges of jobs: links of a command line, sizes of payloads, and settings for models, fleets and links."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hypha_ray.codec.base import NAMES, encoder, payload_bytes
from hypha_ray.config.load import from_tables
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.exchange import (
    BYTES_PER_CHUNK,
    MEAN_BITS,
    MOST_BITS,
    Circumstances,
    ExchangeSettings,
    Link,
    ModelShape,
    PayloadSizes,
    encoded_bytes,
    estimate,
    fragment_sizes,
    parse_latency,
    parse_link,
    rate_text,
    size_notes,
)
from hypha_ray.simulation.ladder import ExchangeChoice, Limits, choose, most_fragments, sufficient_scale
from tests.support.plugins import Written, written

__all__ = ["written"]

ALL = Limits(total_steps=100_000, overlaps=True, encodes_weights=True)
BITS = ("huffman2", "int4", "int8", "bf16", "fp32")
"""Codecs from the fewest bits to the most."""


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
    assert (rate_text(999.9), rate_text(1_234_567)) == ("1000 Mbit/s", "1235 Gbit/s")
    assert str(Link(50, 5)) == "50 Mbit/s down and 5 Mbit/s up"


def real_bytes(codec: str, size: int) -> int:
    rng = np.random.default_rng(0)
    theta = {"parameters/float32": np.zeros(size, np.float32)}
    values = {"parameters/float32": rng.standard_normal(size).astype(np.float32)}
    payload, _ = encoder(codec, 0.0).encode(values, theta)
    return payload_bytes(payload)


@pytest.mark.parametrize("size", [1, 127, 4096, 300_001])
@pytest.mark.parametrize("codec", sorted(BYTES_PER_CHUNK))
def test_fixed_size_is_that_of_a_real_payload(codec: str, size: int) -> None:
    assert encoded_bytes(codec, size) == real_bytes(codec, size)


@pytest.mark.parametrize("codec", sorted(MEAN_BITS))
def test_estimated_size_is_near_that_of_gaussian_values(codec: str) -> None:
    assert encoded_bytes(codec, 2_000_000) == pytest.approx(real_bytes(codec, 2_000_000), rel=0.06)


def test_every_codec_has_a_size() -> None:
    assert {*BYTES_PER_CHUNK, *MEAN_BITS, *MOST_BITS} == set(NAMES)


def test_fragments_are_all_parameters_in_even_parts() -> None:
    sizes = fragment_sizes(1003, 4)
    assert sum(sizes) == 1003
    assert max(sizes) - min(sizes) <= 1


def test_fragments_in_turn_send_one_at_a_time_and_all_in_the_last_round() -> None:
    job = from_tables({"rounds": {"update_rounds": 5}, "sync": {"fragments": 4, "codec": "bf16"}})
    sizes = PayloadSizes(job, 1000)
    assert [sizes.delta_bytes(number) for number in range(5)] == [500, 500, 500, 500, 2000]


def test_weights_are_coded_if_the_job_says_so() -> None:
    assert PayloadSizes(from_tables({}), 1000).coded_bytes(0) == 0
    job = from_tables({"sync": {"downward_codec": "bf16"}})
    assert PayloadSizes(job, 1000).coded_bytes(0) == 2000


OWN = """
import torch
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.plugins import Options

class Signs(Chunked):
    class Options(Options):
        means: int = 1

    name = "signs"
    chunk = 64
    arrays = {"signs": ("int8", 64), "sizes": ("float32", 1)}

    def __init__(self, options):
        self.arrays = self.arrays | {"sizes": ("float32", options.means)}

    def compress(self, values):
        means = values.abs().mean(1, keepdim=True).expand(-1, self.arrays["sizes"][1])
        return {"signs": torch.sign(values).to(torch.int8), "sizes": means}

    def expand(self, parts):
        return parts["signs"] * parts["sizes"][:, :1]
"""


def test_codecs_of_a_user_have_the_sizes_of_their_real_payloads(written: Written) -> None:
    name = f"{written(OWN)}:Signs"
    sync = {"codec": name, "downward_codec": name, "downward_codec_options": {"means": 3}}
    sizes = PayloadSizes(from_tables({"sync": sync}), 1000)
    assert sizes.delta_bytes(0) == real_bytes(name, 1000) == 16 * (64 + 4)
    assert sizes.coded_bytes(0) == 16 * (64 + 3 * 4)


def test_estimates_are_noted() -> None:
    assert size_notes(from_tables({})) == ()
    (note,) = size_notes(from_tables({"sync": {"codec": "huffman3"}}))
    assert "huffman3" in note
    (bound,) = size_notes(from_tables({"sync": {"codec": "visible", "downward_codec": "visible"}}))
    assert "bytes of visible are the most" in bound


def test_largest_size_is_that_of_values_that_are_all_visible() -> None:
    assert encoded_bytes("visible", 300_001) == pytest.approx(real_bytes("visible", 300_001), rel=1e-4)


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
