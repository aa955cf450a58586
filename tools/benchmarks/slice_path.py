"""Slices of 16 MiB from a data node to a worker on another node, against bare refs between two actors there.

Both send the same tensors, as many at a time, and to the same reader. The data node reads each of them from disk and
hashes it, and looks at a slice's header when it reads it first. The bare actor has them in memory.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.data.actor import READS_AT_ONCE
from hypha_ray.data.catalogue import index
from hypha_ray.data.slices import Arrays
from hypha_ray.driver.cluster_offers import serve

Rows: TypeAlias = dict[str, dict[str, Any]]
SLICE_BYTES = 16 << 20
SLICES = 24
WARM_UP = [SLICES] * 72
"""Reads of a slice that doesn't count: a new process has to map the store's memory first, as the bare actor's has."""
TURNS = 7
REST_S = 1.0
"""Rest before each path, in which Ray deletes the slices of the one before."""
ROWS = ("slice_path", "slice_path_first")
LENGTH = 1024


class _Bare:
    """Has all slices in memory."""

    def __init__(self) -> None:
        self._slices = [_slice(number) for number in range(SLICES)]

    def give(self, number: int) -> tuple[Arrays, int]:
        return self._slices[number], number


class _Reader:
    """Takes slices as a worker does: it keeps them as they are, in shared memory."""

    def take(self, arrays: Arrays) -> int:
        return sum(array.nbytes for array in arrays.values())


def slice_path() -> Rows:
    """Throughput of slices from a data node on another node ÷ that of bare refs, in turn."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    shared = {"object_store_memory": 1 << 30, "temp_dir": str(folder)}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **shared})
    try:
        source, target = (cluster.add_node(num_cpus=2, object_store_memory=1 << 30).node_id for _ in range(2))
        ray.init(address=cluster.address, namespace="bench", log_to_driver=False)
        return _rows(folder / "slices", source, target)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _rows(folder: Path, source: str, target: str) -> Rows:
    _write(folder)
    bare: Any = ray.remote(_Bare).options(max_concurrency=READS_AT_ONCE, **_on(source)).remote()
    reader: Any = ray.remote(_Reader).options(**_on(target)).remote()

    def from_memory(number: int) -> tuple[Any, Any]:
        return tuple(bare.give.options(num_returns=2).remote(number))

    turns = []
    # All data nodes start before anything is timed: the start of a process takes Ray seconds of a core.
    for node in [serve(str(folder), f"bench-{turn}", source).actor for turn in range(1 + TURNS)]:

        def from_node(number: int, node: Any = node) -> tuple[Any, Any]:
            return tuple(node.serve_to.options(num_returns=2).remote("bench", number))

        _seconds(from_node, reader, WARM_UP)
        turns.append((_seconds(from_node, reader), _seconds(from_node, reader), _seconds(from_memory, reader)))
    firsts, laters, bares = zip(*turns[1:], strict=True)
    return {"slice_path": _row(laters, bares), "slice_path_first": _row(firsts, bares)}


def _row(paths: Sequence[float], bares: Sequence[float]) -> dict[str, Any]:
    ratios = sorted(bare / path for path, bare in zip(paths, bares, strict=True))
    mib = SLICES * SLICE_BYTES / 2**20
    return {
        "value": median(ratios),
        "target": ">= 0.9",
        "min": round(ratios[0], 3),
        "max": round(ratios[-1], 3),
        "mib_per_s": round(mib / median(paths)),
        "bare_mib_per_s": round(mib / median(bares)),
        "at_once": READS_AT_ONCE,
    }


def _seconds(give: Callable[[int], tuple[Any, Any]], reader: Any, numbers: Sequence[int] = range(SLICES)) -> float:
    """Time of slices, a few at a time: each next one is asked for when the reader has taken one."""
    time.sleep(REST_S)
    began = time.perf_counter()
    pending = deque[Any]()
    for number in numbers:
        if len(pending) == READS_AT_ONCE:
            ray.get(pending.popleft())
        pending.append(reader.take.remote(give(number)[0]))
    assert sum(ray.get(list(pending))) == len(pending) * SLICE_BYTES
    return time.perf_counter() - began


def _slice(number: int) -> Arrays:
    shape = (SLICE_BYTES // (2 * 4 * LENGTH), LENGTH)
    ids = np.random.default_rng(number).integers(0, 50_000, shape, np.int32)
    return {"input_ids": ids, "attention_mask": np.ones(shape, np.int32)}


def _write(folder: Path) -> None:
    """A folder of bare slices, and their manifest."""
    from safetensors.numpy import save_file

    folder.mkdir()
    for number in range(SLICES + 1):
        save_file(_slice(number), folder / f"slice-{number:05d}.safetensors")
    index(folder, folder.iterdir())


def _on(node_id: str) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False), "num_cpus": 0}
