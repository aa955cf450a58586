"""Rows about one GPU: loop, automatic settings, transformers' Trainer, exchange, generation, and start.

python jobs/bench.py --only gpu                 # on a machine with a GPU, some minutes
python jobs/bench.py --only gpu --device cpu    # a stand-in of tiny size, whose figures mean nothing
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from benchmarks.gpu.exchange import exchange
from benchmarks.gpu.generation import generation
from benchmarks.gpu.settings import automatic, loop
from benchmarks.gpu.size import Size, size_of
from benchmarks.gpu.start import start
from benchmarks.gpu.trainer import trainer

Rows = dict[str, dict[str, Any]]
PARTS: dict[str, Callable[[Size], Rows]] = {
    "gpu_loop": loop,
    "gpu_auto": automatic,
    "gpu_trainer": trainer,
    "gpu_exchange": exchange,
    "gpu_generation": generation,
    "gpu_start": start,
}
"""Measurements by the name of their first row."""


def measure_on(device: str, name: str) -> Rows:
    """Measure a row on a device; nothing if it isn't there."""
    if not is_there(device):
        return {}
    size = size_of(device)
    conditions = {"device": size.name(), "torch": torch.__version__}
    return {row: figures | conditions for row, figures in PARTS[name](size).items()}


@cache
def is_there(device: str) -> bool:
    """Whether a device is there; without a GPU one line says so."""
    if device == "cpu" or torch.cuda.is_available():
        return True
    print("gpu: there is no GPU here, so nothing is measured; --device cpu is a stand-in of tiny size", flush=True)
    return False
