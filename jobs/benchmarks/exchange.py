"""The exchange itself: from the last delta in the object store to new weights in every worker.

Against copying the bytes that must move, which are each worker's delta and each worker's new weights; and against the
all-reduce of gloo, of the same bytes between the same actors.
"""

from __future__ import annotations

import os
import socket
import time
from statistics import median
from typing import Any

import numpy as np
import ray
import torch

from hypha_ray.config import Job
from hypha_ray.model.layout import gather, layout_of, scatter
from hypha_ray.server.actor import ParameterServer
from hypha_ray.types import Flat

TURNS = 5
WIDTH = 1024
SIZES = ((25, 2), (25, 4), (100, 2))
"""Millions of parameters, and workers."""


def _model(millions: int) -> torch.nn.Module:
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(millions * 1e6 / WIDTH**2))]
    return torch.nn.Sequential(*layers)


class _Worker:
    """Has a model, and nothing to train."""

    def __init__(self, rank: int, millions: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self._rank, self._model = rank, _model(millions)
        self._layout = layout_of(self._model)
        self._flat = gather(self._model, self._layout, 0)

    def result(self) -> Flat:
        return self._flat

    def merge(self, weights: Flat) -> None:
        scatter(self._model, self._layout, 0, weights)

    def join(self, address: str, workers: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=address, rank=self._rank, world_size=workers)

    def all_reduce(self) -> None:
        for array in self._flat.values():
            torch.distributed.all_reduce(torch.from_numpy(array))


def exchange() -> dict[str, dict[str, Any]]:
    """For each size the time of an exchange, over that of copying its bytes, and over that of gloo's all-reduce."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=8 << 30)
    try:
        return {name: row for size in SIZES for name, row in _rows(*size).items()}
    finally:
        ray.shutdown()


def _rows(millions: int, count: int) -> dict[str, dict[str, Any]]:
    layout = layout_of(_model(millions))
    server: Any = ray.remote(num_cpus=0, concurrency_groups={"pulse": 1})(ParameterServer).remote(Job())
    workers: list[Any] = [ray.remote(num_cpus=0)(_Worker).remote(rank, millions) for rank in range(count)]
    theta, momentum = workers[0].result.remote(), server.momentum.remote(layout, 0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ray.get([worker.join.remote(address, count) for worker in workers])
    meta = tuple((rank, 0, 1) for rank in range(count))
    taken: list[tuple[float, float, float]] = []
    for turn in range(TURNS + 1):
        payloads = [worker.result.remote() for worker in workers]
        ray.get([server.receive.remote(payload) for payload in payloads])
        began = time.perf_counter()
        theta, momentum, *_ = server.reduce.remote(layout, 0, turn, theta, momentum, meta, *payloads)
        ray.get([worker.merge.remote(theta) for worker in workers])
        ours = time.perf_counter() - began
        began = time.perf_counter()
        ray.get([worker.all_reduce.remote() for worker in workers])
        taken.append((ours, time.perf_counter() - began, _copy(2 * count * layout.bytes())))
    for actor in (server, *workers):
        ray.kill(actor)
    ours, gloo, copying = (median(column) for column in zip(*taken[1:], strict=True))
    name, conditions = f"{millions}M_{count}", {"workers": count, "parameters": layout.bytes() // 4, "turns": TURNS}
    return {
        f"sync_{name}": {"value": ours / copying, "target": "<= 1.5", "seconds": round(ours, 4), **conditions},
        f"sync_gloo_{name}": {"value": ours / gloo, "target": "< 1", "gloo_s": round(gloo, 4), **conditions},
    }


def _copy(size: int) -> float:
    """Seconds to copy so many bytes, by one thread, from memory that is there to memory that is there."""
    part = np.ones(min(size, 1 << 28), np.uint8)
    into = part.copy()
    began = time.perf_counter()
    for start in range(0, size, len(part)):
        np.copyto(into[: size - start], part[: size - start])
    return time.perf_counter() - began
