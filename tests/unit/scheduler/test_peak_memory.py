"""Peaks of memory in a round's record, by worker."""

from __future__ import annotations

from hypha_ray.telemetry.round_records import peak_memory
from hypha_ray.types import Delta, Source


def delta(worker: int, peak: int | None) -> Delta:
    counts = {"samples": 1, "tokens": 1, "scored": 1, "batches": 1, "fragments": 1, "payload_bytes": 1}
    times = {"loss": 1.0, "train_s": 1.0, "data_wait_s": 0.0}
    return Delta(Source("run", worker, 1), 0, spans=(), **counts, **times, peak_memory_bytes=peak)  # type: ignore[arg-type]


def test_worker_with_several_results_in_a_round_has_the_largest_peak() -> None:
    deltas = [delta(2, 70), delta(0, 50), delta(2, 90), delta(2, 80), delta(1, None)]
    assert list(peak_memory(deltas)["peak_memory_bytes"].items()) == [(0, 50), (2, 90)]
    assert peak_memory([delta(0, None)]) == {}
