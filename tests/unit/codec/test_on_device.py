"""Encoding on a device, with torch's operations alone, against encoding on the host: payloads are equal to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hypha_ray.codec.base import NAMES, difference_codec
from hypha_ray.codec.feedback import Feedback, tensors
from hypha_ray.types import Flat
from hypha_ray.worker.device_encoding import ELEMENTWISE, DeviceFeedback, encodes_on_device

SIZES = {"parameters/float32": 3 * 4096 + 77, "parameters/float64": 300}
BLOCK = 4096


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
    for group, size in SIZES.items():
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

    device, waits = DeviceFeedback(codec(), decay, room, BLOCK), []
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
