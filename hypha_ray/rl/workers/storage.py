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
        ids = set(sample.ids)
        with self._changing:
            for key in sample.data:
                others = [one for one in self._samples.get(key, []) if ids.isdisjoint(one.ids)]
                self._samples[key] = [*others, sample]

    def sample(self, ids: Sequence[str], keys: Sequence[str]) -> Sample:
        """Return ids with these keys, in their order."""
        columns = {key: self._with(tuple(ids), key) for key in keys}
        lengths = {key: held.meta.lengths[key] for key, held in columns.items()}
        return Sample(Meta(tuple(ids), lengths), {key: held.data[key] for key, held in columns.items()})

    def clear(self, ids: Collection[str]) -> None:
        """Drop samples of which all ids are among these."""
        gone = set(ids)
        with self._changing:
            for key, held in self._samples.items():
                self._samples[key] = [one for one in held if not gone.issuperset(one.ids)]

    def _with(self, ids: tuple[str, ...], key: str) -> Sample:
        """Return samples of exactly these ids that have a key, and maybe others."""
        for one in self._samples[key]:
            if one.ids == ids:
                return one
        wanted = set(ids)
        return gather([one.select([key]) for one in self._samples[key] if not wanted.isdisjoint(one.ids)]).take(ids)
