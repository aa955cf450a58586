"""The part of an exchange between a GPU and its host: weights in, weights or payloads out.

Times stand beside floors that are measured in turns with them: one copy between the device and pinned memory, and one
between it and ordinary memory. Payloads that are made on the device are compared with those of the host, to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from hypha_ray.codec import encoder, payload_bytes
from hypha_ray.model.layout import gather, layout_of, scatter
from hypha_ray.optim.step import Step, WholeModel
from hypha_ray.types import Flat, Layout, Samples
from hypha_ray.worker.device_encoding import ELEMENTWISE, DeviceEncoding

MILLIONS = 100
WIDTH = 1024
TURNS = 7
CODECS = tuple(kind.name for kind in ELEMENTWISE)
ROWS = ("device_merge", "device_gather", *(f"device_{name}" for name in CODECS))
_PLENTY = 1 << 60


class _Trainer(WholeModel):
    """Has a model on a device, and nothing to train."""

    def __init__(self, device: torch.device, millions: float, width: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(max(2, round(millions * 1e6 / width**2)))]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.device = device

    def step(self, batch: Samples) -> Step:
        """Take no step: there is no data."""
        raise NotImplementedError

    @torch.no_grad()
    def change(self, turn: int) -> None:
        """Move the weights a little, as training would."""
        torch.manual_seed(turn)
        for parameter in self.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-4)


def device_exchange(
    device: torch.device | None = None, millions: float = MILLIONS, width: int = WIDTH, turns: int = TURNS
) -> dict[str, dict[str, Any]]:
    """Measure copies and encodings of a model on a device.

    Args:
        device: the device; None: the first GPU.
        millions: size of the model, in millions of parameters.
        width: width of its layers.
        turns: turns that count, after one that doesn't.

    Raises:
        RuntimeError: there is no GPU, or a payload of the device isn't that of the host.

    """
    if device is None and not torch.cuda.is_available():
        raise RuntimeError("there is no GPU here")
    trainer = _Trainer(device or torch.device("cuda:0"), millions, width)
    layout = layout_of(trainer.model)
    rows = {"device_merge": _merge(trainer, layout, turns), "device_gather": _gather(trainer, layout, turns)}
    return rows | {f"device_{name}": _encode(trainer, layout, name, turns) for name in CODECS}


def _merge(trainer: _Trainer, layout: Layout, turns: int) -> dict[str, Any]:
    """New weights from ordinary memory into the model."""
    flat = {group: np.array(array) for group, array in gather(trainer.model, layout, 0).items()}
    source = torch.from_numpy(next(iter(flat.values())))
    target = torch.empty_like(source, device=trainer.device)
    pinned = _pinned(source, trainer.device)
    times = _times(
        trainer.device,
        turns,
        ours=lambda: scatter(trainer.model, layout, 0, flat),
        floor=lambda: target.copy_(pinned, non_blocking=True),
        pageable=lambda: target.copy_(source),
    )
    if not all(np.array_equal(flat[group], array) for group, array in gather(trainer.model, layout, 0).items()):
        raise RuntimeError("the model hasn't the weights that were merged")
    return _row(times, source.nbytes)


def _gather(trainer: _Trainer, layout: Layout, turns: int) -> dict[str, Any]:
    """Weights out of the model, into arrays that are there."""
    out = gather(trainer.model, layout, 0)
    size = sum(array.nbytes for array in out.values())
    source = torch.empty(size // 4, device=trainer.device)
    pinned = _pinned(source, trainer.device)
    pageable = torch.empty(size // 4)
    times = _times(
        trainer.device,
        turns,
        ours=lambda: gather(trainer.model, layout, 0, out),
        floor=lambda: pinned.copy_(source, non_blocking=True),
        pageable=lambda: pageable.copy_(source),
    )
    return _row(times, size)


def _encode(trainer: _Trainer, layout: Layout, codec: str, turns: int) -> dict[str, Any]:
    """Payloads with feedback, encoded on the device and on the host of the same weights."""
    host = encoder(codec, 1.0)
    beside = encoder(codec, 1.0)
    device = DeviceEncoding(trainer, layout, [beside], codec, 1.0, lambda: _PLENTY)  # type: ignore[arg-type]
    spent: dict[str, list[float]] = {"device": [], "host": []}
    results: Flat | None = None
    crossed = 0
    device.payload(0)  # It sees that there is memory.
    for turn in range(1 + turns):
        theta = {group: np.array(array) for group, array in gather(trainer.model, layout, 0).items()}
        device.take({0: theta}, mixed=False)
        trainer.change(turn)
        _wait(trainer.device)
        began = time.perf_counter()
        encoded = device.payload(0)
        spent["device"].append(time.perf_counter() - began)
        began = time.perf_counter()
        results = gather(trainer.model, layout, 0, results)
        expected, _ = host.encode(results, theta)
        spent["host"].append(time.perf_counter() - began)
        if encoded is None or any(encoded[0][name].tobytes() != array.tobytes() for name, array in expected.items()):
            raise RuntimeError(f"payloads of {codec} differ between device and host, in turn {turn}")
        crossed = payload_bytes(encoded[0])
    least = {side: median(seconds[1:]) for side, seconds in spent.items()}
    weights = sum(array.nbytes for array in theta.values())
    times = {f"{side}_ms": round(1e3 * seconds, 2) for side, seconds in least.items()}
    conditions = {"crossed_bytes": crossed, "weights_bytes": weights, "part": round(crossed / weights, 3)}
    return {
        "value": least["device"] / least["host"],
        "target": "< 1",
        **times,
        **conditions,
        "equal_payloads": 1 + turns,
    }


def _pinned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=device.type == "cuda").copy_(like)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _times(device: torch.device, turns: int, **methods: Callable[[], Any]) -> dict[str, float]:
    """Run methods in turns; return the median of each one's seconds, until the device is done."""
    spent: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(1 + turns):
        for method, run in methods.items():
            _wait(device)
            began = time.perf_counter()
            run()
            _wait(device)
            spent[method].append(time.perf_counter() - began)
    return {method: median(seconds[1:]) for method, seconds in spent.items()}


def _row(times: dict[str, float], size: int) -> dict[str, Any]:
    """Return the ratio to the copy with pinned memory, and what crossed in a second."""
    rates = {f"{method}_gib_s": round(size / seconds / 2**30, 1) for method, seconds in times.items()}
    return {"value": times["ours"] / times["floor"], "target": "<= 2", **rates, "crossed_bytes": size}
