"""Signs that nothing is learned from rewards: each is a line for the user, once a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from hypha_ray.scheduler import messages as c
from hypha_ray.telemetry.round_records import LearningReports
from hypha_ray.types import Delta, Sums
from tests.support.fleet import Fleet, done, job_of, rounds, slices_of


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
