"""Account of the speeds of a run's workers, which is posted for later jobs of the same training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ray.exceptions import RayError

from hypha_ray.config import Job
from hypha_ray.market.groups import lease_entries
from hypha_ray.market.nodes import cluster_nodes, post_speeds
from hypha_ray.market.speeds import places, training_key
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.types import Delta, Event, Source

POST_S = 10.0
"""Least seconds between two posts."""
CHANGE = 0.05
"""Least relative change of a speed that is posted."""


@dataclass(slots=True)
class _Measured:
    """Samples of a worker, and seconds in which it has computed them; its first round counts as warm-up."""

    samples: int = 0
    seconds: float = 0.0
    posted: float = 0.0
    """Speed posted last."""

    @property
    def speed(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def is_news(self) -> bool:
        return abs(self.speed - self.posted) > CHANGE * self.posted


class SpeedBook:
    """Measures the workers of a run that compute in Ray, by their deltas.

    Args:
        job: the job file.
        run: name of the run.
        actors: actors of the run, which know where each worker is.

    """

    def __init__(self, job: Job, run: str, actors: RunActors) -> None:
        self._job = job
        self._run = run
        self._actors = actors
        self._training: str | None = None
        self._measured: dict[Source, _Measured] = {}
        self._post_at = 0.0

    def open(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Key of the training, whose samples have tensors of these shapes."""
        self._training = training_key(self._job, shapes)
        return self._training

    def hear(self, event: Event) -> None:
        """Count what a worker has trained on in a round."""
        if not isinstance(event, Delta) or self._job.group_of(event.source.worker).bridged:
            return
        if event.source not in self._measured:
            self._measured[event.source] = _Measured()
            return
        measured = self._measured[event.source]
        measured.samples += event.samples
        measured.seconds += max(0.0, event.train_s - event.data_wait_s)

    async def post(self) -> None:
        """Post the speeds that have changed, of workers that are still there."""
        self._measured = {source: one for source, one in self._measured.items() if self._is_there(source)}
        news = {source.worker: one for source, one in self._measured.items() if one.is_news}
        if news and time.monotonic() >= self._post_at:
            self._post_at = time.monotonic() + POST_S
            with suppress(RayError):  # The control service doesn't answer: a later round posts them.
                await asyncio.to_thread(self._write, {f"worker-{worker}": one.speed for worker, one in news.items()})
                for one in news.values():
                    one.posted = one.speed

    def _is_there(self, source: Source) -> bool:
        found = self._actors.worker(source.worker)
        return found is not None and found[1] == source

    def _write(self, speeds: Mapping[str, float]) -> None:
        """Post speeds by name of the lease."""
        nodes = {node.id: node for node in cluster_nodes()}
        found = dict[str, float]()
        for entry in lease_entries(self._run):
            if entry.name in speeds and entry.node in nodes:
                found |= dict.fromkeys(places(nodes[entry.node], entry.amounts), speeds[entry.name])
        post_speeds(str(self._training), found)
