"""Codecs: bytes of each, what is left out and made up for, and encoding on a device as on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_ray.codec import NAMES, Form, codec, difference_codec, encoded, encoder, payload_bytes
from hypha_ray.codec.feedback import BLOCK, Feedback, advance, blocks, publish, tensors
from hypha_ray.errors import ConfigError
from hypha_ray.server.payloads import misfit
from hypha_ray.types import Flat
from hypha_ray.worker.device_encoding import ELEMENTWISE, DeviceFeedback, encodes_on_device

GROUP, MEAN = "parameters/float32", "buffers/float32"
LOSSY = [name for name in NAMES if name != "fp32"]
BITS = {"bf16": 16, "fp16": 16, "int8": 8.125, "int4": 4.125, "e3m0": 4 + 16 / 1024, "topk": (128 * 14 + 32) / 4096}
BITS |= {"huffman3": 2.69, "huffman2": 1.67, "visible": 16}
"""Of Gaussian values, which are all visible beside zeros."""
ERRORS = {"bf16": 0.003, "fp16": 0.001, "int8": 0.01, "int4": 0.15, "e3m0": 0.2, "topk": 0.95}
ERRORS |= {"huffman3": 0.21, "huffman2": 0.41, "visible": 0.003}
"""Relative errors that Gaussian values stay below."""
SIZE = BLOCK + 12_345
GROUP_SIZES = {"parameters/float32": 3 * 4096 + 77, "parameters/float64": 300}
DEVICE_BLOCK = 4096


@pytest.fixture(params=LOSSY)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.set_num_threads(1)
    yield request.param


def values(seed: int, size: int = SIZE, scale: float = 1e-2) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def decoded(name: str, payload: Flat, size: int, group: str = GROUP) -> np.ndarray:
    views = tensors(payload)
    return np.concatenate([codec(name).decode(views, group, part).numpy() for part in blocks(size)])


def few_weights() -> dict[str, np.ndarray]:
    return {GROUP: np.array([1.5, -0.0, 1e-45, 3e38], np.float32), "buffers/int64": np.array([7], np.int64)}


def test_fp32_encode_decode_keeps_every_bit() -> None:
    fp32 = codec("fp32")
    payload = tensors(encoder("fp32", 1.0).encode(few_weights(), None)[0])
    decoded = [fp32.decode(payload, GROUP, slice(start, start + 2)).numpy() for start in (0, 2)]
    assert np.concatenate(decoded).tobytes() == few_weights()[GROUP].tobytes()
    assert fp32.yields == "weights"


def test_fp32_encode_copies_nothing() -> None:
    flat = few_weights()
    payload, _ = encoder("fp32", 1.0).encode(flat, None)
    assert all(np.shares_memory(array, flat[group]) for group, array in payload.items())


def test_fp32_form_describes_its_own_payload() -> None:
    flat = few_weights()
    form = codec("fp32").form({group: array.size for group, array in flat.items()})
    assert form == {GROUP: Form("float32", 4), "buffers/int64": Form("int64", 1)}


def test_payload_bytes_counts_all_groups() -> None:
    assert payload_bytes(few_weights()) == 4 * 4 + 8


def test_codec_unknown_name_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match="'fp23', allowed fp32, bf16, "):
        codec("fp23")


def test_tensors_of_read_only_array_shares_memory_without_a_warning() -> None:
    array = np.arange(3, dtype=np.float32)
    view = array.view()
    view.flags.writeable = False
    tensor = tensors({GROUP: view})[GROUP]
    array[0] = 5
    assert tensor.tolist() == [5, 1, 2]


def test_error_of_gaussian_values_is_small_and_told(name: str) -> None:
    delta = values(1)
    payload, quality = encoder(name, 0.0).encode({GROUP: delta}, None)
    found = decoded(name, payload, SIZE)
    error = np.linalg.norm(found - delta) / np.linalg.norm(delta)
    cosine = found @ delta / np.linalg.norm(found) / np.linalg.norm(delta)
    assert quality.error == pytest.approx(error, rel=1e-4) and quality.cosine == pytest.approx(cosine, rel=1e-4)
    assert 0 < error < ERRORS[name] and cosine > 1 - ERRORS[name] ** 2 - 1e-5


def test_payload_has_the_form_that_is_declared_and_its_bytes(name: str) -> None:
    flat = {GROUP: values(1), MEAN: values(2, 7), "buffers/int64": np.array([3, 4])}
    payload, _ = encoder(name, 1.0).encode(flat, None)
    form = codec(name).form({group: array.size for group, array in flat.items()})
    assert misfit(payload, form) is None
    if all(one.exact for one in form.values()):
        assert {key: (array.dtype.name, array.size, True) for key, array in payload.items()} == form
    assert all(array.flags.c_contiguous and array.ndim == 1 for array in payload.values())
    coded = payload_bytes(payload) - flat[MEAN].nbytes - flat["buffers/int64"].nbytes
    assert coded == pytest.approx(SIZE * BITS[name] / 8, rel=0.02)
    assert payload[MEAN] is flat[MEAN], "buffers travel as they are"


def test_weights_are_sent_as_their_difference_to_theta(name: str) -> None:
    theta, delta = values(3, scale=1.0), values(1)
    by_weights, _ = encoder(name, 0.0).encode({GROUP: theta + delta}, {GROUP: theta})
    itself, _ = encoder(name, 0.0).encode({GROUP: (theta + delta) - theta}, None)
    assert all(np.array_equal(by_weights[key], itself[key]) for key in itself)


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_what_is_left_out_is_made_up_for(name: str, decay: float) -> None:
    """Σ decoded + residual = Σ Δ, with a decay of 1."""
    feeding, total, expected = encoder(name, decay), np.zeros(SIZE), np.zeros(SIZE)
    residual = np.zeros(SIZE)
    for seed in range(6):
        delta = values(seed)
        payload, _ = feeding.encode({GROUP: delta}, None)
        found = decoded(name, payload, SIZE)
        total, expected = total + found, expected + delta
        residual = delta + decay * residual - found
    assert np.abs(feeding.residual[GROUP] - residual).max() < 1e-7
    if decay == 1:
        assert np.abs(total + feeding.residual[GROUP] - expected).max() < 1e-7


@pytest.mark.slow
def test_feedback_brings_the_sum_near_where_it_would_stay_far(name: str) -> None:
    delta = values(1)

    def sum_of(decay: float) -> float:
        one = encoder(name, decay)
        total = sum(decoded(name, one.encode({GROUP: delta}, None)[0], SIZE) for _ in range(40))
        return float(np.linalg.norm(total / 40 - delta) / np.linalg.norm(delta))

    assert sum_of(1.0) < sum_of(0.0) / 2


def test_zeros_stay_zeros(name: str) -> None:
    payload, quality = encoder(name, 1.0).encode({GROUP: np.zeros(5000, np.float32)}, None)
    assert not decoded(name, payload, 5000).any() and (quality.error, quality.cosine) == (0.0, 1.0)


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damage_is_not_hidden(name: str, damage: float) -> None:
    delta = values(1, 9000)
    delta[4321] = damage
    payload, _ = encoder(name, 0.0).encode({GROUP: delta}, None)
    assert not np.isfinite(decoded(name, payload, 9000)).all()


def test_damage_is_not_fed_back(name: str) -> None:
    sender, damaged = encoder(name, 1.0), values(1, 9000)
    damaged[4321] = np.nan
    sender.encode({GROUP: damaged}, None)
    payload, _ = sender.encode({GROUP: values(2, 9000)}, None)
    fresh, _ = encoder(name, 1.0).encode({GROUP: values(2, 9000)}, None)
    assert all(np.array_equal(payload[key], fresh[key]) for key in fresh)


def test_scale_of_the_values_hardly_matters(name: str) -> None:
    """But to fp16, which has no scale."""
    for scale in (1.0, 1e3) if name == "fp16" else (1e-44, 1e-38, 1e-20, 1e20, 1e37):
        delta = values(1, 5000, 1.0).clip(-3, 3) * np.float32(scale)
        found = decoded(name, encoder(name, 0.0).encode({GROUP: delta}, None)[0], 5000)
        assert np.isfinite(found).all()
        if scale > 1e-38:
            assert np.linalg.norm((found - delta) / scale) < ERRORS[name] * np.linalg.norm(delta / scale)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(LOSSY), st.integers(1, 9000), st.integers(0, 99))
def test_any_size_is_decoded_whole(which: str, size: int, seed: int) -> None:
    delta = values(seed, size)
    payload, _ = encoder(which, 1.0).encode({GROUP: delta}, None)
    found = decoded(which, payload, size)
    assert found.shape == delta.shape and found.dtype == np.float32
    if which == "topk":
        assert (found != 0).sum() <= 128 * -(-size // 4096)
    else:
        assert np.abs(found - delta).max() <= np.abs(delta).max() * {"huffman3": 0.36, "huffman2": 0.8}.get(which, 0.26)


def test_noise_from_a_stranger_is_decoded_to_something(name: str) -> None:
    form = codec(name).form({GROUP: 5000})
    rng = np.random.default_rng(5)
    noise = {key: np.frombuffer(rng.bytes(np.dtype(d).itemsize * n), d).copy() for key, (d, n, _) in form.items()}
    assert decoded(name, noise, 5000).shape == (5000,)


def test_parameters_of_double_precision_come_back_as_such(name: str) -> None:
    group = "parameters/float64"
    theta, delta = values(3, 3000, 1.0).astype(np.float64), values(1, 3000).astype(np.float64)
    payload, _ = encoder(name, 0.0).encode({group: theta + delta}, {group: theta})
    found = decoded(name, payload, 3000, group)
    assert found.dtype == np.float64
    assert np.linalg.norm(found - delta) < ERRORS[name] * np.linalg.norm(delta)


def test_fragments_are_encoded_one_by_one_and_measured_together(name: str) -> None:
    parts = [{GROUP: values(1, 5000)}, {GROUP: values(2, 3000, 1e-2)}]
    encoders = [encoder(name, 1.0), encoder(name, 1.0)]
    payloads, quality = encoded(encoders, parts, ())
    found = [decoded(name, payload, part[GROUP].size) for payload, part in zip(payloads, parts, strict=True)]
    wanted = np.concatenate([part[GROUP] for part in parts])
    error = np.linalg.norm(np.concatenate(found) - wanted) / np.linalg.norm(wanted)
    assert quality.error == pytest.approx(error, rel=1e-4)


def test_both_ends_have_the_same_weights_to_the_bit_and_nothing_is_lost_for_good(name: str) -> None:
    chosen = difference_codec(name)
    assert chosen is not None
    theta, left_out = {GROUP: values(3, scale=1.0), MEAN: values(4, 7)}, dict[str, np.ndarray]()
    wanted, worker = theta[GROUP].astype(np.float64), theta
    for seed in range(5):
        step = values(seed)
        new = {GROUP: theta[GROUP] + step, MEAN: values(seed, 7)}
        before = {group: array.copy() for group, array in left_out.items()}
        payload, left = publish(chosen, 1.0, theta, new, left_out)
        assert all(np.array_equal(left_out[group], before[group]) for group in before)
        worker = advance(chosen, worker, payload)
        assert all(worker[group].tobytes() == new[group].tobytes() for group in new)
        wanted, theta, left_out = wanted + step, new, left
    assert np.abs(theta[GROUP] + left_out[GROUP] - wanted).max() < 1e-5


def test_values_whose_squares_overflow_are_told_of_and_made_up_for(name: str) -> None:
    """All that is finite: fp16 can say less than that."""
    huge = values(3, 1000, 1e4 if name == "fp16" else 1e25)
    sender = encoder(name, 1.0)
    payload, quality = sender.encode({GROUP: huge}, None)
    found = decoded(name, payload, 1000)
    error = np.linalg.norm(found.astype(np.float64) - huge) / np.linalg.norm(huge.astype(np.float64))
    assert quality.error == pytest.approx(error, rel=1e-3) and 0 < quality.error < ERRORS[name]
    assert np.abs(found + sender.residual[GROUP] - huge).max() <= 1e-6 * np.abs(huge).max()


@dataclass
class Whole:
    """A group's elements that lie in one tensor."""

    values: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.values)

    def block(self, part: slice) -> torch.Tensor:
        return self.values[part]


def weights(seed: int) -> Flat:
    """Weights of both groups, with zeros, subnormal numbers and outliers among them."""
    generator = np.random.default_rng(seed)
    flat: Flat = {}
    for group, size in GROUP_SIZES.items():
        values = generator.normal(0, 0.02, size) * 10.0 ** generator.integers(-6, 3, size)
        values[:300] = 0
        values[300:310] *= 1e-38
        flat[group] = values.astype(group.rsplit("/", maxsplit=1)[-1])
    return flat


@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("codec", ELEMENTWISE, ids=lambda kind: kind.name)
def test_payloads_of_several_rounds_are_those_of_the_host(codec: type, decay: float) -> None:
    host, rooms = Feedback(codec(), decay), []

    def room(size: int, dtype: torch.dtype) -> torch.Tensor:
        rooms.append(torch.empty(size, dtype=dtype))
        return rooms[-1]

    device, waits = DeviceFeedback(codec(), decay, room, DEVICE_BLOCK), []
    theta = weights(0)
    for number in range(1, 4):
        values = weights(number)
        expected, quality = host.encode({group: array.copy() for group, array in values.items()}, theta)
        elements = {group: Whole(tensor) for group, tensor in tensors(values).items()}
        payload, own = device.encode(elements, tensors(theta), lambda: waits.append(1))

        assert payload.keys() == expected.keys()
        for name, array in expected.items():
            assert payload[name].dtype == array.dtype and payload[name].tobytes() == array.tobytes(), name
        assert own.error == pytest.approx(quality.error, rel=1e-4)
        assert own.cosine == pytest.approx(quality.cosine, rel=1e-4)
        assert device.residual.keys() == host.residual.keys()
        for group, array in host.residual.items():
            assert torch.equal(device.residual[group], torch.from_numpy(array))
    assert len(waits) == 3
    assert len(rooms) == len(expected)


@pytest.mark.parametrize("codec", ELEMENTWISE, ids=lambda kind: kind.name)
def test_a_damaged_result_is_none_that_later_ones_make_up_for(codec: type) -> None:
    device = DeviceFeedback(codec(), 1.0, lambda size, dtype: torch.empty(size, dtype=dtype))
    theta = {"parameters/float32": torch.zeros(5000)}
    values = torch.randn(5000)
    device.encode({"parameters/float32": Whole(values)}, theta, lambda: None)
    assert device.residual
    values[4000] = torch.inf

    _, quality = device.encode({"parameters/float32": Whole(values)}, theta, lambda: None)

    assert not np.isfinite(quality.difference)
    assert not device.residual


def test_codecs_with_sums_over_a_chunk_stay_on_the_host() -> None:
    on_host = {name for name in NAMES if not encodes_on_device(difference_codec(name))}
    assert on_host == {"fp32", "huffman2", "huffman3", "topk", "visible"}
