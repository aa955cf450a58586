"""Payloads of plain 32-bit floats, and the views through which the server reads them."""

from __future__ import annotations

import numpy as np
import pytest

from hypha_ray.codec import Form, codec, encoder, payload_bytes
from hypha_ray.codec.feedback import tensors
from hypha_ray.errors import ConfigError

GROUP = "parameters/float32"


def weights() -> dict[str, np.ndarray]:
    return {GROUP: np.array([1.5, -0.0, 1e-45, 3e38], np.float32), "buffers/int64": np.array([7], np.int64)}


def test_fp32_encode_decode_keeps_every_bit() -> None:
    fp32 = codec("fp32")
    payload = tensors(encoder("fp32", 1.0).encode(weights(), None)[0])
    decoded = [fp32.decode(payload, GROUP, slice(start, start + 2)).numpy() for start in (0, 2)]
    assert np.concatenate(decoded).tobytes() == weights()[GROUP].tobytes()
    assert fp32.yields == "weights"


def test_fp32_encode_copies_nothing() -> None:
    flat = weights()
    payload, _ = encoder("fp32", 1.0).encode(flat, None)
    assert all(np.shares_memory(array, flat[group]) for group, array in payload.items())


def test_fp32_form_describes_its_own_payload() -> None:
    flat = weights()
    form = codec("fp32").form({group: array.size for group, array in flat.items()})
    assert form == {GROUP: Form("float32", 4), "buffers/int64": Form("int64", 1)}


def test_payload_bytes_counts_all_groups() -> None:
    assert payload_bytes(weights()) == 4 * 4 + 8


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
