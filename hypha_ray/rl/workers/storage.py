"""Samples that a model worker holds: those that it made, and those that were transferred to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import Lock

from hypha_ray.rl.dataflow.sample import Meta, Sample, gather


class Storage:
    """Samples by key and id. Requests that are answered at once may change it while another one computes."""

    def __init__(self) -> None:
        self._changing = Lock()
        self._samples: dict[str, list[Sample]] = {}  # by key

    def keep(self, sample: Sample) -> None:
        """Add samples; they replace those of the same ids, which a repeated step makes again."""
        with self._changing:
            for key in sample.data:
                others = [one for one in self._samples.get(key, []) if not set(one.ids) & set(sample.ids)]
                self._samples[key] = [*others, sample.select([key])]

    def sample(self, ids: Sequence[str], keys: Sequence[str]) -> Sample:
        """Return ids with these keys, in their order."""
        columns = {key: self._column(ids, key) for key in keys}
        lengths = {key: column.meta.lengths[key] for key, column in columns.items()}
        return Sample(Meta(tuple(ids), lengths), {key: column.data[key] for key, column in columns.items()})

    def clear(self, ids: Collection[str]) -> None:
        """Drop samples of which all ids are among these."""
        gone = set(ids)
        with self._changing:
            for key, held in self._samples.items():
                self._samples[key] = [one for one in held if not gone.issuperset(one.ids)]

    def _column(self, ids: Sequence[str], key: str) -> Sample:
        wanted = set(ids)
        return gather([one for one in self._samples[key] if not wanted.isdisjoint(one.ids)]).take(ids)
