"""Samples that a model worker holds: those that it made, and those that were transferred to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce

from hypha_ray.rl.dataflow.sample import Sample, gather


class Storage:
    """Samples by key and id."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = {}  # by key

    def keep(self, sample: Sample) -> None:
        """Add samples."""
        for key in sample.data:
            self._samples.setdefault(key, []).append(sample.select([key]))

    def sample(self, ids: Sequence[str], keys: Sequence[str]) -> Sample:
        """Return ids with these keys, in their order."""
        return reduce(Sample.update, (self._column(ids, key) for key in keys))

    def clear(self, ids: Collection[str]) -> None:
        """Drop samples of which all ids are among these."""
        gone = set(ids)
        for key, held in self._samples.items():
            self._samples[key] = [one for one in held if not gone.issuperset(one.ids)]

    def _column(self, ids: Sequence[str], key: str) -> Sample:
        wanted = set(ids)
        return gather([one for one in self._samples[key] if not wanted.isdisjoint(one.ids)]).take(ids)
