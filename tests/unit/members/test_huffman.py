"""Huffman codes: fewer bytes than even steps of equal length, and nothing that a damaged stream can do."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest

from hypha_ray.codec import codec, encoder, payload_bytes
from hypha_ray.codec.feedback import BLOCK, blocks, tensors
from hypha_ray.server.payloads import misfit
from hypha_ray.types import Flat

GROUP = "parameters/float32"
CODES, ENDS, SCALES = (f"{GROUP}/{name}" for name in ("codes", "ends", "scales"))
SIZE = 2 * BLOCK + 1000
NAMES = ("huffman3", "huffman2")


def heavy(seed: int, size: int = SIZE) -> np.ndarray:
    """Values of which some are far out, as differences of weights are."""
    return (np.random.default_rng(seed).standard_t(3, size) * 1e-3).astype(np.float32)


def decoded(name: str, payload: Flat, size: int = SIZE) -> np.ndarray:
    views = tensors(payload)
    return np.concatenate([codec(name).decode(views, GROUP, part).numpy() for part in blocks(size)])


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_values_with_outliers_lose_less_than_by_four_bits_and_take_fewer_bytes() -> None:
    delta = heavy(1)
    huffman, quality = encoder("huffman3", 0.0).encode({GROUP: delta}, None)
    even, other = encoder("int4", 0.0).encode({GROUP: delta}, None)
    assert payload_bytes(huffman) < 0.65 * payload_bytes(even)
    assert quality.error < 1.3 * other.error


def test_bytes_are_as_few_as_the_frequencies_of_the_codes_allow(name: str) -> None:
    delta = np.random.default_rng(2).standard_normal(SIZE).astype(np.float32)
    payload, _ = encoder(name, 0.0).encode({GROUP: delta}, None)
    found = decoded(name, payload).reshape(-1)[: 2 * BLOCK].reshape(-1, 256)
    scales = tensors(payload)[SCALES].numpy()[: len(found)]
    steps = np.rint(found / (scales.astype(np.uint32) << 16).view(np.float32)[:, None])
    _, counts = np.unique(steps, return_counts=True)
    shares = counts / counts.sum()
    entropy = -(shares * np.log2(shares)).sum()
    assert 8 * payload[CODES].size / SIZE < entropy * 1.04


def test_all_of_a_group_is_what_its_blocks_are(name: str) -> None:
    payload, _ = encoder(name, 0.0).encode({GROUP: heavy(3)}, None)
    whole = codec(name).decode(tensors(payload), GROUP, slice(None)).numpy()
    assert np.array_equal(whole[:SIZE], decoded(name, payload)) and not whole[SIZE:].any()


def test_equal_values_and_lonely_ones_come_near(name: str) -> None:
    for delta in (np.full(300, 3e-3, np.float32), np.eye(1, 700, 299, dtype=np.float32)[0]):
        payload, _ = encoder(name, 0.0).encode({GROUP: delta}, None)
        assert np.abs(decoded(name, payload, delta.size) - delta).max() <= 0.6 * delta.max()


@pytest.mark.parametrize("what", ["shorter", "longer", "flipped", "negative", "beyond", "backwards", "bomb", "stored"])
def test_damaged_stream_gives_what_is_no_number_in_its_block(name: str, what: str) -> None:
    payload, _ = encoder(name, 0.0).encode({GROUP: heavy(4)}, None)
    ends, codes = payload[ENDS].copy(), payload[CODES].copy()
    if what == "shorter":
        ends[1] -= 7
    elif what == "longer":
        ends[1] += 7
    elif what == "flipped":
        codes[ends[0] + 1 : ends[0] + 40] ^= 0x5A
    elif what == "negative":
        ends[1] = -3
    elif what == "beyond":
        ends[1] = 1 << 60
    elif what == "backwards":
        ends[1] = ends[0] - 1
    else:
        writer = zlib.compressobj(9 if what == "bomb" else 0, zlib.DEFLATED, -15)
        filler = writer.compress(bytes(1 << 24 if what == "bomb" else 1 << 16)) + writer.flush()
        codes = np.concatenate([codes[: ends[0]], np.frombuffer(filler, np.uint8), codes[ends[1] :]])
        ends[1:] += len(filler) - (payload[ENDS][1] - ends[0])
    damaged = payload | {ENDS: ends, CODES: codes}
    found = decoded(name, damaged)
    assert np.isfinite(found[:BLOCK]).all() and not np.isfinite(found[BLOCK : 2 * BLOCK]).any()


def test_more_bytes_than_any_stream_needs_are_turned_away(name: str) -> None:
    payload, _ = encoder(name, 0.0).encode({GROUP: np.random.default_rng(0).random(5000, np.float32)}, None)
    form = codec(name).form({GROUP: 5000})
    assert misfit(payload, form) is None
    large = payload | {CODES: np.zeros(form[CODES].size + 1, np.uint8)}
    assert "at most" in str(misfit(large, form))


def test_codes_that_cannot_be_made_fewer_fit_in_too(name: str) -> None:
    flat = np.tile(np.arange(-7, 8, dtype=np.float32), 40_000)[:SIZE]
    np.random.default_rng(1).shuffle(flat)
    payload, _ = encoder(name, 0.0).encode({GROUP: flat}, None)
    assert misfit(payload, codec(name).form({GROUP: SIZE})) is None
    assert np.isfinite(decoded(name, payload)).all()


@pytest.mark.slow
def test_stream_that_grows_without_end_takes_no_memory(name: str) -> None:
    payload, _ = encoder(name, 0.0).encode({GROUP: heavy(5, BLOCK)}, None)
    writer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = writer.compress(bytes(256 << 20)) + writer.flush()
    payload |= {CODES: np.frombuffer(bomb, np.uint8), ENDS: np.array([len(bomb)])}
    tracemalloc.start()
    try:
        assert np.isnan(decoded(name, payload, BLOCK)).all()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
