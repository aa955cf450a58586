"""The exchange itself: from the last delta in the object store to new weights in every worker.

Against copying the bytes that must move, by one thread from memory to memory: each worker's delta once, and each
worker's new weights once. That the server has to read θ and momentum too and to write both anew, that Ray copies
results into its store, and every call between the processes: that is what the ratio is for. And against averaging
tensors of the same size: by the all-reduce of gloo between the same actors, and by the peers that are installed.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.peers import PEERS, Peer, installed
from hypha_ray.config import Job
from hypha_ray.model.layout import gather, layout_of, scatter
from hypha_ray.scheduler.runtime.run_actors import actor_class
from hypha_ray.server.actor import StepRequest
from hypha_ray.types import Flat, Layout

TURNS = 27
WARM = 9
"""Turns that count, and those before them, in which the store's memory is touched for the first time."""
EVERY = 3
"""Turns of which one has the peers in it too: hivemind takes seconds to bring its processes together."""
WIDTH = 1024
SIZES = ((25, 2), (25, 4), (100, 2), (100, 4))
"""Millions of parameters, and workers."""
EXCHANGES = ("sync", "sync_gloo", *(f"sync_{name}" for name in PEERS))
"""Names of the rows of a size."""


def _model(millions: int) -> torch.nn.Module:
    count = round(millions * 1e6 / WIDTH**2)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]
    return torch.nn.Sequential(*layers)


class _Worker:
    """Has a model, and nothing to train."""

    def __init__(self, rank: int, millions: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self._rank = rank
        self._model = _model(millions)
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
    """For each size the time of an exchange, over that of copying its bytes, and over that of others' averaging."""
    for name in sorted({*PEERS} - {*installed()}):
        print(f"skipping sync_{name}_…: {name} isn't installed (pip install 'hypha_ray[peers]')", file=sys.stderr)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=8 << 30)
    try:
        rows: dict[str, dict[str, Any]] = {}
        for millions, count in SIZES:
            rows |= _rows(millions, count)
        return rows
    finally:
        ray.shutdown()


def _rows(millions: int, count: int) -> dict[str, dict[str, Any]]:
    layout = layout_of(_model(millions))
    parameters = layout.bytes() // 4
    with ExitStack() as stack:
        peers = {name: stack.enter_context(closing(Peer(name, count, parameters))) for name in installed()}
        server: Any = actor_class("server").options(num_cpus=0).remote(Job())
        worker_class: Any = ray.remote(num_cpus=0)(_Worker)
        workers = [worker_class.remote(rank, millions) for rank in range(count)]
        state = [workers[0].result.remote(), server.momentum.remote(layout, 0)]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        ray.get([worker.join.remote(f"tcp://127.0.0.1:{port}", count) for worker in workers])
        turns: list[dict[str, float]] = []
        for number in range(WARM + TURNS):
            seconds = _ours(server, workers, layout, number, state)
            seconds["gloo"] = _gloo(workers)
            if number % EVERY == 0:
                for name, peer in peers.items():
                    seconds[name] = peer.turn()
            seconds["copy"] = _copy(2 * count * layout.bytes())
            turns.append(seconds)
    for actor in (server, *workers):
        ray.kill(actor)
    columns = {}
    for name in turns[0]:
        columns[name] = [turn[name] for turn in turns[WARM:] if name in turn]
    return _table(f"{millions}M_{count}", columns, {"workers": count, "parameters": parameters})


def _ours(server: Any, workers: list[Any], layout: Layout, number: int, state: list[Any]) -> dict[str, float]:
    """Seconds until every worker has new weights, and until the server's new momentum is in the store too."""
    payloads = [worker.result.remote() for worker in workers]
    ray.get([server.receive.remote(payload) for payload in payloads])
    senders = tuple((rank, 0, 1) for rank in range(len(workers)))
    began = time.perf_counter()
    call = StepRequest(str(number), layout, 0, number, senders), *state, *payloads
    theta, _, verdict = server.reduce.remote(*call)
    merged = [worker.merge.remote(theta) for worker in workers]
    ray.get(verdict)
    momentum, receipt = server.momentum_after.remote(*call)
    ray.get(merged)
    exchange_s = time.perf_counter() - began
    ray.get(receipt)
    state[:] = theta, momentum
    return {"sync": exchange_s, "momentum": time.perf_counter() - began}


def _gloo(workers: list[Any]) -> float:
    began = time.perf_counter()
    ray.get([worker.all_reduce.remote() for worker in workers])
    return time.perf_counter() - began


def _table(name: str, columns: dict[str, list[float]], conditions: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The rows of one size, of the turns' seconds: medians, and from least to most."""
    medians = {method: median(column) for method, column in columns.items()}
    texts = {}
    for method, column in columns.items():
        texts[method] = f"{medians[method]:.4f} ({min(column):.4f}-{max(column):.4f})"
    rows = {}
    for method in medians.keys() - {"sync", "momentum"}:
        row_name = f"sync_{method}_{name}"
        target = "< 1"
        shown = ["sync", method]
        if method == "copy":
            row_name = f"sync_{name}"
            target = "<= 1.5"
            shown = ["sync", "momentum", "copy"]
        times = {f"{shown_method}_s": texts[shown_method] for shown_method in shown}
        row = {"value": medians["sync"] / medians[method], "target": target}
        rows[row_name] = row | times | conditions | {"turns": len(columns[method])}
    return {row_name: rows[row_name] for row_name in sorted(rows, key=len)}


def _copy(size: int) -> float:
    """Seconds to copy so many bytes, by one thread, from memory that is there to memory that is there."""
    part = np.ones(min(size, 1 << 28), np.uint8)
    into = part.copy()
    began = time.perf_counter()
    for start in range(0, size, len(part)):
        np.copyto(into[: size - start], part[: size - start])
    return time.perf_counter() - began
