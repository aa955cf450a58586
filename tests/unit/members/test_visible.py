"""Visible changes: which values are sent, in how few bytes, that the others are kept, and that no stream does harm."""

from __future__ import annotations

import math
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_ray.codec import codec, difference_codec, downward_codec, encoder, payload_bytes
from hypha_ray.codec.feedback import BLOCK, Feedback, advance, blocks, publish, tensors
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.members.streams import SENT, patch_stream, read_patch
from hypha_ray.server.payloads import misfit
from hypha_ray.types import Flat

GROUP = "parameters/float32"
CODES, ENDS, LENGTH = (f"{GROUP}/{name}" for name in ("codes", "ends", "size"))
SIZE = 2 * BLOCK + 1000
Array = npt.NDArray[np.float32]


def patch_codec() -> Chunked:
    chosen = downward_codec("visible")
    assert chosen is not None
    return chosen


def delta_codec() -> Chunked:
    chosen = difference_codec("visible")
    assert chosen is not None
    return chosen.upward()


def changes_up(payload: Flat, theta: Flat) -> Array:
    """Changes as a server with θ decodes them."""
    views = tensors(payload)
    weights = tensors(theta)[GROUP]
    parts = [delta_codec().decode(views, GROUP, part, weights[part]).numpy() for part in blocks(len(weights))]
    return np.concatenate(parts)


def normal(seed: int, scale: float, size: int = SIZE) -> Array:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Bits in bfloat16, rounded to the nearest, ties to even, by integer arithmetic."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: npt.NDArray[np.uint16]) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def decoded(payload: Flat, size: int = SIZE) -> Array:
    views = tensors(payload)
    parts = [codec("visible").decode(views, GROUP, part).numpy() for part in blocks(size)]
    return np.concatenate(parts)


def test_values_that_bfloat16_shows_are_sent_and_the_others_are_kept() -> None:
    theta = normal(1, 0.02)
    change = normal(2, 1e-6)
    sender = encoder("visible", 1.0)
    payload, _ = sender.encode({GROUP: theta + change}, {GROUP: theta})
    target = (theta + change) - theta
    visible = bfloat16(theta + target) != bfloat16(theta)
    assert 0.005 < visible.mean() < 0.1
    values = decoded(payload)
    assert not values[~visible].any()
    difference = widened(bfloat16(theta + target)) - theta
    assert np.array_equal(values[visible], widened(bfloat16(difference))[visible])
    assert np.array_equal(sender.residual[GROUP], target - values)


def test_small_changes_take_a_fiftieth_and_all_values_no_more_than_bfloat16() -> None:
    theta = normal(1, 0.02)
    plain = 2 * SIZE
    small, _ = encoder("visible", 1.0).encode({GROUP: theta + normal(2, 3e-7)}, {GROUP: theta})
    assert payload_bytes(small) < plain / 50
    large, _ = encoder("visible", 1.0).encode({GROUP: theta + normal(2, 1.0)}, {GROUP: theta})
    assert plain <= payload_bytes(large) < 1.0001 * plain
    none, _ = encoder("visible", 1.0).encode({GROUP: theta}, {GROUP: theta})
    assert payload_bytes(none) == none[ENDS].nbytes + 8
    assert not decoded(none).any()


def test_block_of_which_most_is_visible_is_that_of_bfloat16() -> None:
    theta = normal(1, 0.02)
    weights = theta + normal(2, 1e-3)
    payload, quality = encoder("visible", 1.0).encode({GROUP: weights}, {GROUP: theta})
    plain, plain_quality = encoder("bf16", 1.0).encode({GROUP: weights}, {GROUP: theta})
    assert np.array_equal(decoded(payload), widened(plain[f"{GROUP}/codes"]))
    assert quality == plain_quality


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5000), st.floats(-9, 0), st.integers(0, 99))
def test_payload_of_any_change_is_decoded_and_never_much_larger_than_bfloat16(
    size: int, exponent: float, seed: int
) -> None:
    theta = normal(seed, 0.02, size)
    sender = encoder("visible", 1.0)
    change = normal(seed + 1, 10.0**exponent, size)
    payload, _ = sender.encode({GROUP: theta + change}, {GROUP: theta})
    target = (theta + change) - theta
    values = decoded(payload, size)
    assert misfit(payload, codec("visible").form({GROUP: size})) is None
    assert payload_bytes(payload) <= 2 * size + 17
    assert np.array_equal(target - values, sender.residual[GROUP])
    sent = values != 0
    shown = bfloat16(theta + target)
    difference = target
    if (shown != bfloat16(theta)).mean() <= 2 / 3:
        difference = widened(shown) - theta
    assert np.array_equal(values[sent], widened(bfloat16(difference))[sent])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3000), st.floats(-8, 0), st.integers(0, 99))
def test_receivers_weights_are_the_servers_in_bfloat16_to_the_bit(size: int, exponent: float, seed: int) -> None:
    """Weights of engines that are told of each patch are those of a full reload of the server's whole weights."""
    theta: Flat = {GROUP: normal(seed, 0.02, size)}
    residual: Flat = {}
    receiver = theta
    for round_number in range(4):
        step = normal(100 * seed + round_number, 10.0**exponent, size)
        new = {GROUP: theta[GROUP] + step}
        target = new[GROUP] - theta[GROUP]
        whole = theta[GROUP] + (target + residual.get(GROUP, np.zeros(size, np.float32)))
        payload, residual = publish(patch_codec(), 1.0, theta, new, residual)
        receiver = advance(patch_codec(), receiver, payload)
        assert receiver[GROUP].tobytes() == new[GROUP].tobytes()
        assert np.array_equal(bfloat16(new[GROUP]), bfloat16(whole))
        changed = bfloat16(whole) != bfloat16(theta[GROUP])
        assert np.array_equal(new[GROUP][~changed], theta[GROUP][~changed])
        assert payload_bytes(payload) <= 2 * size + 17
        theta = new


def test_forty_rounds_of_two_workers_swallow_nothing() -> None:
    """Weights, and what both ends have kept, add up to all changes: those of an exchange in fp32."""
    size = 30_000
    start = normal(0, 0.02, size)
    theta: Flat = {GROUP: start}
    expected = start.astype(np.float64)
    kept_below: Flat = {}
    workers = [encoder("visible", 1.0), encoder("visible", 1.0)]
    drift = normal(9, 1e-6, size)
    sent = 0
    for round_number in range(40):
        mean = np.zeros(size, np.float32)
        for number, worker in enumerate(workers):
            change = drift + normal(2 * round_number + number, 1e-6, size)
            weights = theta[GROUP] + change
            expected += (weights - theta[GROUP]).astype(np.float64) / 2
            payload, _ = worker.encode({GROUP: weights}, theta)
            sent += payload_bytes(payload)
            mean += decoded(payload, size) / 2
        new = {GROUP: theta[GROUP] + mean}
        payload, kept_below = publish(patch_codec(), 1.0, theta, new, kept_below)
        sent += 2 * payload_bytes(payload)
        theta = new
    total = theta[GROUP].astype(np.float64) + kept_below[GROUP]
    for worker in workers:
        total += worker.residual[GROUP].astype(np.float64) / 2
    distance = np.linalg.norm(expected - start)
    assert np.linalg.norm(total - expected) < 0.01 * distance
    assert sent < 40 * 4 * 2 * size / 20


def test_receiver_with_the_weights_is_sent_the_same_changes_in_two_thirds_of_the_bytes() -> None:
    theta = {GROUP: normal(1, 0.02)}
    weights = {GROUP: theta[GROUP] + normal(2, 1e-6)}
    sender = Feedback(delta_codec(), 1.0)
    payload, _ = sender.encode({GROUP: weights[GROUP].copy()}, theta)
    plain, _ = encoder("visible", 1.0).encode(weights, theta)
    assert payload_bytes(payload) < payload_bytes(plain) * 2 / 3
    target = weights[GROUP] - theta[GROUP]
    shown = bfloat16(theta[GROUP] + target)
    visible = shown != bfloat16(theta[GROUP])
    values = changes_up(payload, theta)
    assert not values[~visible].any()
    assert np.array_equal(values[visible], (widened(shown) - theta[GROUP])[visible])
    assert np.array_equal(sender.residual[GROUP], target - values)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5000), st.floats(-9, 0), st.integers(0, 99), st.booleans())
def test_any_delta_is_decoded_by_the_weights_as_its_sender_expects(
    size: int, exponent: float, seed: int, last: bool
) -> None:
    theta = {GROUP: normal(seed, 0.02, size)}
    weights = theta[GROUP] + normal(seed + 1, 10.0**exponent, size)
    sender = Feedback(delta_codec(), 1.0)
    payload, quality = sender.encode({GROUP: weights.copy()}, theta, last)
    target = weights - theta[GROUP]
    assert misfit(payload, delta_codec().form({GROUP: size})) is None
    assert payload_bytes(payload) <= 2 * size + 17
    assert np.array_equal(sender.residual[GROUP], target - changes_up(payload, theta))
    if last:
        bound = 2**-6 + 2**-8  # Of a single value with 5 bits; thousands of values have half of it.
        assert quality.error <= bound
        assert np.abs(sender.residual[GROUP]).max() <= np.abs(target).max() * bound


def test_last_round_brings_all_that_was_postponed_as_if_it_had_come_in_time() -> None:
    """Forty rounds of two workers and Nesterov's momentum: whole weights are those of an exchange in fp32."""
    size = 30_000
    mu, eta = np.float32(0.5), np.float32(0.7)
    theta: Flat = {GROUP: normal(0, 0.02, size)}
    start = theta[GROUP].astype(np.float64)
    velocity = np.zeros(size, np.float32)
    exact = start.copy()
    exact_velocity = np.zeros(size)
    left_out: Flat = {}
    workers = [Feedback(delta_codec(), 1.0, 0.5), Feedback(delta_codec(), 1.0, 0.5)]
    drift = normal(9, 1e-6, size)
    sent = 0
    for round_number in range(40):
        mean = np.zeros(size, np.float32)
        exact_mean = np.zeros(size)
        for number, worker in enumerate(workers):
            weights = theta[GROUP] + drift + normal(2 * round_number + number, 1e-6, size)
            exact_mean += (weights - theta[GROUP]).astype(np.float64) / 2
            payload, _ = worker.encode({GROUP: weights}, theta, round_number == 39)
            sent += payload_bytes(payload)
            mean += changes_up(payload, theta) / 2
        exact_velocity = 0.5 * exact_velocity + exact_mean
        exact += 0.7 * (exact_mean + 0.5 * exact_velocity)
        velocity = mu * velocity + mean
        new = {GROUP: theta[GROUP] + eta * (mean + mu * velocity)}
        payload, left_out = publish(patch_codec(), 1.0, theta, new, left_out)
        sent += 2 * payload_bytes(payload)
        theta = new
    distance = np.linalg.norm(exact - start)
    whole = theta[GROUP].astype(np.float64) + left_out[GROUP]
    assert np.linalg.norm(whole - exact) < 0.005 * distance
    assert np.linalg.norm(theta[GROUP] - exact) > 0.2 * distance, "what workers have lacks what was left out"
    assert sent < 40 * 4 * 2 * size / 20


def test_resumed_server_and_workers_go_on_to_the_bit() -> None:
    """Feedback is an array of each group, so what is saved and loaded gives the same payloads."""
    theta: Flat = {GROUP: normal(0, 0.02, 5000)}
    sender = encoder("visible", 1.0)
    sender.encode({GROUP: theta[GROUP] + normal(1, 1e-6, 5000)}, theta)
    successor = encoder("visible", 1.0)
    successor.residual[GROUP] = sender.residual[GROUP].copy()
    later = theta[GROUP] + normal(2, 1e-6, 5000)
    payload, _ = sender.encode({GROUP: later.copy()}, theta)
    other, _ = successor.encode({GROUP: later.copy()}, theta)
    forgetful, _ = encoder("visible", 1.0).encode({GROUP: later.copy()}, theta)
    assert all(np.array_equal(payload[name], other[name]) for name in payload)
    assert not np.array_equal(decoded(payload, 5000), decoded(forgetful, 5000))


def sparse() -> tuple[Flat, Flat]:
    """A payload of three blocks with few visible values, and its θ."""
    theta = {GROUP: normal(1, 0.02)}
    payload, _ = encoder("visible", 0.0).encode({GROUP: theta[GROUP] + normal(2, 1e-6)}, theta)
    return payload, theta


def damaged(what: str) -> Flat:
    """The payload of `sparse` with a second block that isn't one."""
    payload, _ = sparse()
    ends = payload[ENDS].copy()
    codes = payload[CODES].copy()
    second = slice(int(ends[0]), int(ends[1]))
    replacement = STREAMS.get(what)
    match what:
        case "shorter":
            ends[1] -= 7
        case "negative":
            ends[1] = -3
        case "beyond":
            ends[1] = 1 << 60
        case "backwards":
            ends[1] = ends[0] - 1
        case "flipped":
            codes[second.start + 8 : second.start + 60] ^= 0x5A
        case "few bytes":
            replacement = b"\1\2\3"
        case "bomb":
            writer = zlib.compressobj(9, zlib.DEFLATED, -15)
            replacement = stream_of(1, "1")[:-5] + writer.compress(bytes(1 << 24)) + writer.flush()
    if replacement is not None:
        joined = codes[: ends[0]].tobytes() + replacement + codes[ends[1] :].tobytes()
        codes = np.frombuffer(joined, np.uint8)
        ends[1:] += len(replacement) - (second.stop - second.start)
    return payload | {ENDS: ends, CODES: codes}


def stream_of(count: int, unary: str, upper: int | None = None, values: int | None = None) -> bytes:
    """A stream of the lowest band alone: number of values, upper bits of the gaps, and as many values."""
    numbers = [count, *[0] * 7, len(unary) if upper is None else upper]
    header = b"".join(number.to_bytes(3, "little") for number in numbers)
    bits = np.packbits([int(bit) for bit in unary]).tobytes()
    width = max(0, math.frexp(0.4812 * (BLOCK / count - 0.5))[1])
    values = min(count, 9) if values is None else values
    writer = zlib.compressobj(9, zlib.DEFLATED, -15)
    planes = writer.compress(bytes(-(-values // 8) + 2 * values)) + writer.flush()
    return header + bits + bytes(-(-width * min(count, 9) // 8)) + planes


HARMLESS = "harmless"
STREAMS = {
    HARMLESS: stream_of(3, "111"),
    "more values": stream_of(BLOCK + 1, "1" * 8),
    "past the end": stream_of(1, "0" * 9 + "1"),
    "open gap": stream_of(2, "100"),
    "more gaps": stream_of(1, "101"),
    "long gaps": stream_of(1, "1", upper=1 << 23),
    "few values": stream_of(1, "1", values=0),
}
DAMAGES = ["shorter", "negative", "beyond", "backwards", "flipped", "few bytes", "bomb", *STREAMS]
DAMAGES.remove(HARMLESS)


def test_stream_by_hand_is_decoded() -> None:
    """So that the streams of `damaged` are refused for their damage alone."""
    payload = damaged(HARMLESS)
    values = decoded(payload)
    assert np.isfinite(values).all()
    assert not values[BLOCK : 2 * BLOCK].any()


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_stream_gives_no_number_in_its_block(what: str) -> None:
    payload = damaged(what)
    values = decoded(payload)
    assert np.isfinite(values[:BLOCK]).all()
    assert np.isnan(values[BLOCK : 2 * BLOCK]).all()
    _, theta = sparse()
    new = advance(patch_codec(), theta, payload)
    assert np.isnan(new[GROUP][BLOCK : 2 * BLOCK]).all()
    assert np.isnan(changes_up(payload, theta)[BLOCK : 2 * BLOCK]).all()


@pytest.mark.parametrize("length", [0, -1, BLOCK, 1 << 60, SIZE - 1])
def test_false_length_of_a_group_gives_no_number(length: int) -> None:
    payload = sparse()[0] | {LENGTH: np.array([length])}
    assert np.isnan(decoded(payload)[2 * BLOCK :]).all()


def test_whole_group_is_decoded_as_its_blocks_are() -> None:
    payload, _ = sparse()
    whole = codec("visible").decode(tensors(payload), GROUP, slice(None)).numpy()
    assert np.array_equal(whole, decoded(payload))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(-5, 400), min_size=1, max_size=1), st.integers(1, 400))
def test_any_bytes_are_decoded_to_something(content: bytes, ends: list[int], size: int) -> None:
    codes = np.frombuffer(bytearray(content), np.uint8)
    payload = {CODES: codes, ENDS: np.array(ends), LENGTH: np.array([size])}
    assert decoded(payload, size).shape == (size,)
    new = advance(patch_codec(), {GROUP: np.ones(size, np.float32)}, payload)
    assert new[GROUP].shape == (size,)


def test_steps_of_all_bits_are_told_by_their_codes() -> None:
    """Every bfloat16 becomes another: of both signs, zeros, subnormal and large values."""
    every = widened(np.arange(1 << 16, dtype=np.uint16))
    finite = every[np.abs(every) < 1e38]
    theta = {GROUP: finite}
    new = {GROUP: np.random.default_rng(0).permutation(finite)}
    whole = finite + (new[GROUP] - finite)
    payload, _ = publish(patch_codec(), 0.0, theta, new, {})
    receiver = advance(patch_codec(), theta, payload)
    assert receiver[GROUP].tobytes() == new[GROUP].tobytes()
    assert np.array_equal(bfloat16(receiver[GROUP]), bfloat16(whole))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.lists(st.floats(0, 1), min_size=8, max_size=8), st.integers(0, 99))
def test_bits_of_a_patch_are_rice_codes_of_gaps_band_by_band(size: int, shares: list[float], seed: int) -> None:
    """The same stream by strings of bits, of which the compiled loops know nothing."""
    rng = np.random.default_rng(seed)
    bands = rng.integers(0, 8, size).astype(np.uint8)
    sent = rng.random(size) < np.array(shares)[bands]
    codes = rng.integers(1, 400, size).astype(np.uint16)
    numbers: list[int] = []
    upper = ""
    lower = ""
    values: list[int] = []
    for band in range(8):
        members = [i for i in range(size) if bands[i] == band]
        positions = [place for place, i in enumerate(members) if sent[i]]
        values += [int(codes[i]) for i in members if sent[i]]
        numbers.append(len(positions))
        if 0 < len(positions) < len(members):
            width = max(0, math.frexp(0.4812 * (len(members) / len(positions) - 0.5))[1])
            for before, position in zip([-1, *positions], positions, strict=False):
                gap = position - before - 1
                upper += "0" * (gap >> width) + "1"
                lower += "".join(str(gap >> bit & 1) for bit in range(width))
    expected = b"".join(number.to_bytes(3, "little") for number in [*numbers, len(upper)])
    for bits in (upper, lower):
        expected += np.packbits([int(bit) for bit in bits]).tobytes() if bits else b""

    stream = patch_stream(codes, bands | (sent * SENT).astype(np.uint8), 1)

    assert stream[: len(expected)] == expected
    content = zlib.decompress(stream[len(expected) :], -15)
    signs = np.unpackbits(np.frombuffer(content[: -(-len(values) // 8)], np.uint8), count=len(values))
    planes = np.frombuffer(content[-(-len(values) // 8) :], np.uint8).reshape(2, -1).astype(int)
    assert (planes[1] * 256 + planes[0] + signs).tolist() == [value - 1 for value in values]
    patch = read_patch(stream, bands, 1)
    assert patch is not None
    assert patch[1] == len(values)
    least = 1 if len(values) == size else 0
    assert np.array_equal(patch[0], np.where(sent, codes - least, 0))
