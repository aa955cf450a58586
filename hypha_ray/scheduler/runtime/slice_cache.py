"""Cache of slices between the data shards and the workers: each is read once, and again if its object is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypha_ray.config import Job
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import UNREADABLE
from hypha_ray.errors import DataError, QuarantinedError
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.types import SliceInfo

SLICES_PER_WORKER = 4
"""Slices per worker that stay in the object store for the next reader, beside those that workers hold."""
READS = 3
"""Reads of a slice, from one shard after the other, before it counts as damaged."""


class SliceCache:
    """References to the slices used last.

    Args:
        job: the job file.
        actors: actors of the run, with the shards.

    """

    def __init__(self, job: Job, actors: RunActors) -> None:
        self._job, self._actors = job, actors
        self._slices: dict[int, asyncio.Task[Any]] = {}

    async def manifest(self) -> Manifest:
        """Return the manifest of the dataset.

        Raises:
            DataError: the manifest is missing or damaged.

        """
        announced = await self._actors.shards[0].ask(lambda shard: shard.announce.remote())
        manifest: Manifest = await announced
        return manifest

    async def usable(self, slices: Sequence[SliceInfo]) -> list[SliceInfo]:
        """Return the slices that aren't in quarantine.

        Raises:
            DataError: nothing to train on is left.

        """
        aside = await (await self._actors.store.ask(lambda store: store.quarantined.remote()))
        left = [info for info in slices if info.index not in aside]
        if not any(info.split == "train" for info in left):
            what = f"nothing to train on is left: {len(aside)} slices are damaged"
            raise DataError("DATA028", what, next(iter(aside.values()), ""), fix="prepare the dataset again")
        return left

    async def slice(self, index: int) -> Any:
        """Return a reference to a slice's tensors.

        Raises:
            QuarantinedError: the slice is damaged and was set aside, as the job allows.
            DataError: every read found the slice damaged, or it can't be read.

        """
        if index not in self._slices:
            self._slices[index] = asyncio.ensure_future(self._read(index))
        task = self._slices[index] = self._slices.pop(index)
        while len(self._slices) > SLICES_PER_WORKER * self._job.num_workers:
            del self._slices[next(iter(self._slices))]
        try:
            return await asyncio.shield(task)
        except DataError as error:
            self.forget(index)
            if not self._job.dataset.allow_quarantine or error.code == UNREADABLE:
                raise
            reason = str(getattr(error, "cause", error))  # Ray's own text of it is a traceback.
            await self._actors.store.ask(lambda store: store.quarantine.remote(index, reason))
            what = f"slice {index} is damaged and set aside; going on without it from the last commit"
            raise QuarantinedError("DATA029", what, got=error.what) from None

    def forget(self, index: int) -> None:
        """Drop the reference to a slice whose object is lost."""
        self._slices.pop(index, None)

    async def _read(self, index: int) -> Any:
        for attempt in range(READS):
            shard = self._actors.shards[(index + attempt) % len(self._actors.shards)]
            try:
                tensors, _ = await shard.ask(lambda s: s.serve.options(num_returns=2).remote(index))
                return tensors
            except DataError as error:
                damage = error
        raise damage
