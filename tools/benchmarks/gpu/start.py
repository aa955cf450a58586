"""Seconds from a command to its first line, and to its first worker on a GPU, by a job of two rounds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.size import Size
from benchmarks.start import HERE, measure_start, prepared


def start(size: Size) -> dict[str, dict[str, Any]]:
    """Seconds until the first worker has joined, by one start."""
    lease = ("--resources.num_workers", "1", "--resources.worker.gpu", "1" if size.device == "cuda" else "0")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first_s, joined_s, end_s = measure_start(HERE, prepared(folder), folder / "runs", *lease)
    return {"gpu_start": {"value": joined_s, "target": "", "first_line_s": round(first_s, 2), "end_s": round(end_s, 2)}}
