"""An exchange of one worker's weights, beside the copies and the outer step that it can't do without.

    device ──gather──► host ──► object store ──► outer step ──► object store ──scatter──► device

Floors are measured in the same turns: a copy of all bytes from the device into page-locked memory and one back. Then
come two copies into the object store, and the outer step by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.gpu.size import Size, now_s
from hypha_ray.config.automatic import OFF
from hypha_ray.config.training import OuterOptimizer
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.model.layout import gather, layout_of, scatter
from hypha_ray.model.lora import build_trained
from hypha_ray.server.payloads import Received
from hypha_ray.server.reduce import ReduceSpec, blank, initial_momentum, reduce
from hypha_ray.types import Flat


def exchange(size: Size) -> dict[str, dict[str, Any]]:
    """Seconds of an exchange ÷ those of its floors together."""
    size.forget()
    with connected("bench"):
        turns = Exchange(size)
        columns = [turns.turn(number) for number in range(2 + size.turns)][2:]
    middle = {name: median(turn[name] for turn in columns) for name in columns[0]}
    floors = [name for name in middle if name != "exchange"]
    shown = {f"{name}_ms": round(1e3 * seconds, 2) for name, seconds in middle.items()}
    value = middle["exchange"] / sum(middle[name] for name in floors)
    return {"gpu_exchange": {"value": value, "target": "<= 1.5", **shown, "mb": round(turns.bytes / 1e6)}}


class Exchange:
    """A model on a device, its layout, and the state of an outer optimizer.

    Args:
        size: size of the model.

    """

    def __init__(self, size: Size) -> None:
        self._size = size
        self._model = build_trained(size.job(OFF)).to(size.device)
        self._layout = layout_of(self._model)
        self._spec = ReduceSpec(self._layout, 0, OuterOptimizer())
        self._flat = gather(self._model, self._layout, 0)
        self._theta = {name: array.copy() for name, array in self._flat.items()}
        self._momentum = initial_momentum(self._layout, 0)
        self._out = blank(self._layout, 0)
        self.bytes = self._layout.bytes()
        self._on_host = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=size.device == "cuda")
        self._on_device = torch.zeros(self.bytes, dtype=torch.uint8, device=size.device)
        self._array = np.zeros(self.bytes, np.uint8)

    def turn(self, number: int) -> dict[str, float]:
        """Return seconds of an exchange, and of each of its floors."""
        return {
            "exchange": self._timed(lambda: self._exchange(number)),
            "device_to_host": self._timed(lambda: self._on_host.copy_(self._on_device, non_blocking=True)),
            "store": self._timed(lambda: [_through_store({"bytes": self._array}) for _ in range(2)]),
            "outer_step": self._timed(lambda: self._step(number, self._flat)),
            "host_to_device": self._timed(lambda: self._on_device.copy_(self._on_host, non_blocking=True)),
        }

    def _timed(self, work: Callable[[], Any]) -> float:
        began_s = now_s(self._size)
        work()
        return now_s(self._size) - began_s

    def _exchange(self, number: int) -> None:
        gather(self._model, self._layout, 0, self._flat)
        new = self._step(number, _through_store(self._flat))
        scatter(self._model, self._layout, 0, _through_store(new))

    def _step(self, number: int, payload: Flat) -> Flat:
        received = [Received(0, 1, 1, payload)]
        return reduce(number, self._theta, self._momentum, received, self._spec, self._out)[0]


def _through_store(flat: Flat) -> Flat:
    """Copy arrays into the object store, and return them as they lie there."""
    stored: Flat = ray.get(ray.put(flat))
    return stored
