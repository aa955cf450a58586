"""What tests of the store commit: weights of two fragments, momentum and inner states, all made of a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hypha_ray.failpoints import arm
from hypha_ray.scheduler.messages import Persist
from hypha_ray.types import Contribution, Entry, Flat, Layout, Saved, Span, Verdict

GROUP = "parameters/float32"
LAYOUT = Layout((Entry("a", "float32", (2, 3), 0, GROUP, 0, 6), Entry("b", "float32", (4,), 1, GROUP, 0, 4)), (), 2)
WORKERS = (0, 3)
"""Those whose inner state is saved."""
PARTS = ("model.safetensors", "outer.safetensors", "worker-0.safetensors", "worker-3.safetensors", "state.json")
"""Files of a snapshot, in the order in which they are written."""
POINTS = ("before_snapshot", "after_weights", "before_publish", "before_record", "before_link", "after_record", "write")
"""Places in a commit."""


def flats(seed: int) -> list[Flat]:
    """Weights of both fragments, and then their momentum."""
    rng = np.random.default_rng(seed)
    return [{GROUP: rng.standard_normal(size, dtype=np.float32)} for size in (6, 4, 6, 4)]


def inner_state(worker: int, seed: int) -> Flat:
    return {"exp_avg": np.full(3, 10 * seed + worker, np.float32), "rng": np.arange(seed % 7, dtype=np.uint8)}


def persist(number: int, seed: int) -> Persist:
    """What a scheduler knows of a round; two rounds make an epoch of eight samples."""
    start = 2 * (number % 2)
    spans = tuple((worker, (Span(number // 2, worker, start, start + 2),)) for worker in (0, 1))
    verdict = Verdict(number, tuple(Contribution(worker, 0, 2, 0.1 + seed) for worker in (0, 1)), (), 0.25)
    cursors = {} if number % 2 else {0: 2, 1: 2}
    return Persist(number, verdict, spans, cursors, (number + 1) // 2, {}, {"seed": seed})


def ask(store: Any, number: int, seed: int) -> Saved:
    """Commit a round."""
    states = [inner_state(worker, seed) for worker in WORKERS]
    saved: Saved = store.commit(persist(number, seed), LAYOUT, WORKERS, *flats(seed), *states)
    return saved


@contextmanager
def armed(log: Path, *specs: str) -> Iterator[None]:
    """Failpoints that count anew."""
    log.unlink(missing_ok=True)
    arm(specs, str(log))
    try:
        yield
    finally:
        arm((), None)


def flip(path: Path, place: float = 0.5) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at] ^= 1 << at % 8
    path.write_bytes(data)
