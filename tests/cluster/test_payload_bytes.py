"""What payloads are said to take is what they take in Ray's object store, whatever they are encoded by."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from ray.experimental import get_object_locations

from hypha_ray.codec import NAMES, codec, difference_codec, encoder, payload_bytes
from hypha_ray.codec.feedback import publish
from hypha_ray.types import Flat

pytestmark = pytest.mark.usefixtures("local_ray")

GROUPS = {"parameters/float32": 300_001, "buffers/int64": 3}
OVERHEAD = 2048
"""Bytes of names, shapes and dtypes of a payload's arrays, at most."""


def in_store(payload: Flat) -> int:
    """Size of the object that a payload is put as."""
    reference = ray.put(payload)
    size: int = get_object_locations([reference])[reference]["object_size"]
    return size


def flat(seed: int) -> Flat:
    random = np.random.default_rng(seed)
    return {"parameters/float32": random.standard_normal(GROUPS["parameters/float32"]).astype(np.float32)}


@pytest.mark.parametrize("name", NAMES)
def test_payload_takes_the_bytes_that_it_declares(name: str) -> None:
    payload, _ = encoder(name, 1.0).encode({**flat(1), "buffers/int64": np.arange(3)}, flat(0))
    form = codec(name).form(GROUPS)
    most = sum(np.dtype(array.dtype).itemsize * array.size for array in form.values())
    declared = payload_bytes(payload)
    assert declared == most if all(array.exact for array in form.values()) else declared <= most
    assert declared <= in_store(payload) <= declared + OVERHEAD


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp32"])
def test_difference_takes_the_bytes_that_it_declares(name: str) -> None:
    found = difference_codec(name)
    assert found is not None
    payload, _ = publish(found, 1.0, flat(0), flat(1), {})
    assert payload_bytes(payload) <= in_store(payload) <= payload_bytes(payload) + OVERHEAD
