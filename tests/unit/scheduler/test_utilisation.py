"""The utilisation of GPUs is operations of training over those that the cards are made for, by hand computation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hypha_ray.telemetry.round_records import utilisation
from hypha_ray.types import Delta, Source

H200, HALF_A100 = 989.4e12, 156e12
LLAMA = 6.0 * 152e6


def delta(worker: int, tokens: int | None, train_s: float, peak: float | None = H200, **others: Any) -> Delta:
    plain = {"round": 0, "spans": (), "samples": 1, "scored": 1, "batches": 1, "loss": 1.0, "fragments": 1}
    made = Delta(Source("run", worker, 1), tokens=tokens, payload_bytes=1, train_s=train_s, data_wait_s=0.0, **plain)  # type: ignore[arg-type]
    return dataclasses.replace(made, **{"token_operations": LLAMA, "peak_operations": peak, **others})


def test_utilisation_of_the_measured_run_is_what_was_computed_for_it() -> None:
    """40 steps of 16 × 1024 tokens in 132.3 ms each are 0.114 of an H200."""
    seconds = 40 * 0.1323
    found = utilisation([delta(0, 40 * 16 * 1024, seconds)], seconds)
    assert found["mfu"] == pytest.approx(0.114, abs=5e-4)
    assert found["mfu_by_worker"] == {0: pytest.approx(found["mfu"])}


def test_fleet_counts_all_cards_over_the_whole_round_and_workers_their_own_training() -> None:
    deltas = [delta(0, 1_000_000, 2.0), delta(1, 100_000, 1.0, HALF_A100), delta(1, 300_000, 2.0, HALF_A100)]
    found = utilisation(deltas, 4.0)
    assert found["mfu_by_worker"] == pytest.approx({0: LLAMA * 1e6 / (2 * H200), 1: LLAMA * 4e5 / (3 * HALF_A100)})
    assert found["mfu"] == pytest.approx(LLAMA * 1.4e6 / (4 * (H200 + HALF_A100)))


@pytest.mark.parametrize(
    "unknown", [delta(1, 5, 1.0, None), delta(1, None, 1.0), delta(1, 5, 1.0, token_operations=None), delta(1, 5, 0.0)]
)
def test_fleet_with_a_worker_that_has_no_figure_has_none(unknown: Delta) -> None:
    assert utilisation([unknown], 1.0) == {} == utilisation([], 1.0)
    assert list(utilisation([delta(0, 5, 1.0), unknown], 1.0)) == ["mfu_by_worker"]
