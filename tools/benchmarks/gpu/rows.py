"""Rows about one GPU: loop, automatic settings, transformers' Trainer, exchange, generation, and start.

python jobs/bench.py --only gpu                 # on a machine with a GPU, some minutes
python jobs/bench.py --only gpu --device cpu    # a stand-in of tiny size, whose figures mean nothing
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

Rows = dict[str, dict[str, Any]]
PARTS = {
    "gpu_loop": "settings:loop",
    "gpu_auto": "settings:automatic",
    "gpu_trainer": "trainer:trainer",
    "gpu_exchange": "exchange:exchange",
    "gpu_generation": "generation:generation",
    "gpu_start": "start:start",
}
"""Functions that measure, by the name of their first row; their libraries are loaded where there is a device."""


def measure_on(device: str, name: str) -> Rows:
    """Measure a row on a device; nothing if it isn't there."""
    if not is_there(device):
        return {}
    import torch

    from benchmarks.gpu.size import size_of

    module, _, function = PARTS[name].partition(":")
    measure = getattr(import_module(f"benchmarks.gpu.{module}"), function)
    size = size_of(device)
    conditions = {"device": size.name(), "torch": torch.__version__}
    return {row: figures | conditions for row, figures in measure(size).items()}


@cache
def is_there(device: str) -> bool:
    """Whether a device is there; without a GPU one line says so."""
    if device == "cpu":
        return True
    import torch

    if torch.cuda.is_available():
        return True
    print("gpu: there is no GPU here, so nothing is measured; --device cpu is a stand-in of tiny size", flush=True)
    return False
