"""Sizes of payloads, held against those of real encoders."""

from __future__ import annotations

import numpy as np
import pytest

from hypha_ray.codec.base import NAMES, encoder, payload_bytes
from hypha_ray.config.load import from_tables
from hypha_ray.simulation.exchange import (
    BYTES_PER_CHUNK,
    MEAN_BITS,
    MOST_BITS,
    PayloadSizes,
    encoded_bytes,
    fragment_sizes,
    size_notes,
)


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


def test_estimates_are_noted() -> None:
    assert size_notes(from_tables({})) == ()
    (note,) = size_notes(from_tables({"sync": {"codec": "huffman3"}}))
    assert "huffman3" in note
    (bound,) = size_notes(from_tables({"sync": {"codec": "visible", "downward_codec": "visible"}}))
    assert "bytes of visible are the most" in bound


def test_largest_size_is_that_of_values_that_are_all_visible() -> None:
    assert encoded_bytes("visible", 300_001) == pytest.approx(real_bytes("visible", 300_001), rel=1e-4)
