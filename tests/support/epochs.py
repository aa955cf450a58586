"""Runs that end when every sample has been used a number of times: jobs, counts, and walks through all faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.schema import rounds_for
from hypha_ray.scheduler import messages as c
from hypha_ray.types import SliceInfo
from tests.support.simulation_books import samples_in
from tests.support.walk import Walk
from tests.support.weather import Weather


def train_samples(slices: Sequence[SliceInfo]) -> int:
    return sum(info.samples for info in slices if info.split == "train")


def with_epochs(job: Job, slices: Sequence[SliceInfo], epochs: int) -> Job:
    """The job with epochs in place of its number of rounds."""
    tables: dict[str, Any] = job.model_dump(exclude_unset=True)
    tables["rounds"].pop("update_rounds", None)
    tables["rounds"]["epochs"] = epochs
    job = Job.model_validate(tables)
    return job.lasting(rounds_for(job, epochs * train_samples(slices)))


def uses(persisted: Sequence[c.Persist]) -> Counter[tuple[int, int]]:
    """How often each (slice, sample) is in a commit."""
    counts: Counter[tuple[int, int]] = Counter()
    for persist in persisted:
        for _, spans in persist.spans:
            counts.update((index, number) for _, index, number in samples_in(spans))
    return counts


class EpochWeather(Weather):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.job = with_epochs(self.job, self.slices, 1 + self.job.run.seed % 3)


class EpochWalk(Walk):
    """A walk whose run ends by samples."""

    def calm_walk(self, seed: int) -> Walk:
        return EpochWalk(seed, storm=False)

    def make_weather(self, storm: bool) -> Weather:
        return EpochWeather(self.random, storm)
