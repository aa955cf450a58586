"""Cost of encoding, against a copy of the same bytes, and against moving the bytes that it saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from hypha_ray.codec import NAMES, Encoder, difference_codec, downward_codec, payload_bytes
from hypha_ray.codec.feedback import Feedback, advance, blocks, tensors
from hypha_ray.types import Flat

ELEMENTS = 16 << 20
TURNS = 5
LINK = 1e9 / 8
"""Bytes per second of the link that the saved bytes would have gone over."""
_GROUP = "parameters/float32"
DOWNWARD = "codec_visible_down"
"""Name of the row of new weights."""


def codecs() -> dict[str, dict[str, Any]]:
    """For each codec: time to encode with feedback and to decode, over that to move the bytes that it saves."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(ELEMENTS, np.float32)
    weights = theta + rng.standard_normal(ELEMENTS, np.float32) * np.float32(1e-3)
    rows = {f"codec_{name}": _row(name, {_GROUP: weights}, {_GROUP: theta}) for name in NAMES[1:]}
    rows[DOWNWARD] = _downward_row({_GROUP: weights}, {_GROUP: theta})
    return rows


def _row(name: str, weights: Flat, theta: Flat) -> dict[str, Any]:
    """Measure a codec of deltas, whose receiver has θ."""
    deltas = difference_codec(name)
    assert deltas is not None
    receiver = deltas.upward()
    before = tensors(theta)[_GROUP]

    def decode(payload: Flat) -> None:
        views = tensors(payload)
        for part in blocks(ELEMENTS):
            receiver.decode(views, _GROUP, part, before[part])

    return _measured(Feedback(receiver, 1.0), decode, weights, theta)


def _downward_row(weights: Flat, theta: Flat) -> dict[str, Any]:
    """Measure `visible` as the encoding of new weights."""
    receiver = downward_codec("visible")
    assert receiver is not None
    out = {_GROUP: np.empty_like(weights[_GROUP])}
    return _measured(Feedback(receiver, 1.0), lambda payload: advance(receiver, theta, payload, out), weights, theta)


def _measured(sender: Encoder, decode: Callable[[Flat], Any], weights: Flat, theta: Flat) -> dict[str, Any]:
    """Measure an encoder and its decoder on changes of weights."""
    copy = np.empty_like(weights[_GROUP])
    payload, quality = sender.encode(weights, theta)
    plain = payload_bytes(weights)
    coded = payload_bytes(payload)
    copying, *coding = _medians(
        lambda: np.copyto(copy, weights[_GROUP]), lambda: sender.encode(weights, theta), lambda: decode(payload)
    )
    return {
        "value": sum(coding) / ((plain - coded) / LINK),
        "target": "< 1",
        "encode_GB_per_s": round(plain / coding[0] / 1e9, 2),
        "decode_GB_per_s": round(plain / coding[1] / 1e9, 2),
        "memcpy_GB_per_s": round(plain / copying / 1e9, 2),
        "bits": round(8 * coded / ELEMENTS, 3),
        "error": round(quality.error, 4),
        "elements": ELEMENTS,
        "threads": 1,
    }


def _medians(*actions: Callable[[], Any]) -> list[float]:
    """Median seconds of each, taken in turn."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(TURNS):
        for seconds, action in zip(times, actions, strict=True):
            began = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - began)
    return [median(seconds) for seconds in times]
