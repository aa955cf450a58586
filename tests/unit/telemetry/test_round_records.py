"""Records of rounds: peaks of memory, utilisation of GPUs, and signs that nothing is learned."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from hypha_ray.scheduler import messages as c
from hypha_ray.telemetry.round_records import LearningReports, peak_memory, utilisation
from hypha_ray.types import Delta, Source, Sums
from tests.support.fleet import Fleet, done, job_of, rounds, slices_of

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


def delta_with_peak(worker: int, peak: int | None) -> Delta:
    return delta(worker, 1, 1.0, peak_memory_bytes=peak)


def test_worker_with_several_results_in_a_round_has_the_largest_peak() -> None:
    deltas = [delta_with_peak(*row) for row in ((2, 70), (0, 50), (2, 90), (2, 80), (1, None))]
    assert list(peak_memory(deltas)["peak_memory_bytes"].items()) == [(0, 50), (2, 90)]
    assert peak_memory([delta_with_peak(0, None)]) == {}


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"equal_groups": 1.0, "reward": 0.0}, ["equal rewards in a whole round, 0 in the mean"]),
        ({"truncated": 0.75}, ["75% of a round's responses were cut off"]),
        ({"entropy": 0.004}, ["entropy is near 0 (0.004)"]),
        ({"equal_groups": 0.99, "truncated": 0.5, "entropy": 0.7, "reward": 0.0}, []),
        ({"loss": 0.1}, []),
    ],
)
def test_sign_in_a_record_is_told_once(record: dict[str, Any], told: list[str]) -> None:
    signs = LearningReports()
    first = signs.fresh(record)

    assert len(first) == len(told) and all(part in text for part, text in zip(told, first, strict=True))
    assert signs.fresh(record) == []


class Rewarded(Fleet):
    """A fleet whose deltas have figures of rewards."""

    sums: ClassVar[Sums] = {"equal_groups": (8.0, 8.0), "truncated": (1.0, 64.0), "entropy": (64.0, 64.0)}

    def take_in(self, event: c.Input) -> list[c.Command]:
        return super().take_in(replace(event, sums=self.sums) if isinstance(event, Delta) else event)


@pytest.mark.parametrize("strategy", ["diloco", "async", "sync"])
def test_run_whose_rewards_are_all_equal_says_so_once(strategy: str) -> None:
    job = job_of(rounds=rounds(4), sync={"strategy": strategy})
    fleet = done(Rewarded(job, [0.1, 0.1], slices_of()))

    texts = [note["text"] for note in fleet.noted("problem")]
    assert len([text for text in texts if "equal rewards" in text]) == 1
    assert not [text for text in texts if "cut off" in text or "entropy" in text]
