"""Cache of slices between their readers and the workers: each is read once, and again if its object is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypha_ray.config import Job
from hypha_ray.data.run_dataset import OTHER_SAMPLES
from hypha_ray.data.slices import UNREADABLE
from hypha_ray.errors import DataError, QuarantinedError
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.slices.replica_reader import ReplicaReader
from hypha_ray.scheduler.runtime.slices.slice_readers import SliceReader
from hypha_ray.types import SliceInfo, dataset_of

SLICES_PER_WORKER = 4
"""Slices per worker that stay in the object store for the next reader, beside those that workers hold."""


class SliceCache:
    """References to the slices used last.

    Args:
        job: the job file.
        actors: actors of the run, with the store.
        reader: reads slices.

    """

    def __init__(self, job: Job, actors: RunActors, reader: SliceReader) -> None:
        self._job = job
        self._actors = actors
        self._reader = reader
        self._slices: dict[int, asyncio.Task[Any]] = {}
        self.near: dict[int, frozenset[int]] = {}
        """Slices by worker that it is to get before others; empty unless the job prefers those near to it."""

    async def locate(self, worker: int) -> None:
        """Find out which slices are served near a new worker, if the job prefers these."""
        if self._job.dataset.locality == "prefer" and isinstance(self._reader, ReplicaReader):
            self.near[worker] = await self._reader.near(worker)

    async def usable(self, slices: Sequence[SliceInfo]) -> list[SliceInfo]:
        """Return the slices that aren't in quarantine.

        Raises:
            DataError: nothing to train on is left, in one of the datasets.

        """
        aside = await (await self._actors.store.ask(lambda store: store.quarantined.remote()))
        left = [info for info in slices if info.index not in aside]
        if not _datasets(left) or _datasets(left) != _datasets(slices):
            damaged = "1 slice is" if len(aside) == 1 else f"{len(aside)} slices are"
            what = f"nothing to train on is left: {damaged} damaged"
            raise DataError("DATA028", what, next(iter(aside.values()), ""), fix="prepare the dataset again")
        return left

    async def slice(self, index: int, worker: int) -> Any:
        """Return a reference to a slice's tensors; if they have to be read, then from near that worker.

        Raises:
            QuarantinedError: the slice is damaged and was set aside, as the job allows.
            DataError: every read found the slice damaged, or it can't be read.

        """
        if index not in self._slices:
            self._slices[index] = asyncio.ensure_future(self._reader.read(index, worker))
        task = self._slices[index] = self._slices.pop(index)
        while len(self._slices) > SLICES_PER_WORKER * self._job.num_workers:
            del self._slices[next(iter(self._slices))]
        try:
            return await asyncio.shield(task)
        except DataError as error:
            self.forget(index)
            if not self._job.dataset.allow_quarantine or error.code in (UNREADABLE, OTHER_SAMPLES):
                raise
            reason = str(getattr(error, "cause", error))  # Ray's own text of it is a traceback.
            await self._actors.store.ask(lambda store: store.quarantine.remote(index, reason))
            what = f"slice {index} is damaged and set aside; going on without it from the last commit"
            raise QuarantinedError("DATA029", what, got=error.what) from None

    def forget(self, index: int) -> None:
        """Drop the reference to a slice whose object is lost."""
        self._slices.pop(index, None)


def _datasets(slices: Sequence[SliceInfo]) -> set[int]:
    """Numbers of the datasets that have something to train on."""
    return {dataset_of(info.index) for info in slices if info.split == "train"}
