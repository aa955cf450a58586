"""Workers that a run may have: those that find room on acceptable terms, within its quota at an exchange."""

from __future__ import annotations

import asyncio
import time

from hypha_ray.config import Job
from hypha_ray.errors import CapacityError, OutbidError
from hypha_ray.market.exchange.allotment import Ruling
from hypha_ray.market.exchange.client import ExchangeClient
from hypha_ray.market.nodes import own_node
from hypha_ray.market.requirements import worker_needs
from hypha_ray.market.staffing import workers_to_hire
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.runtime.run_actors import RunActors

AGAIN_S = 1.0
"""Seconds between two looks for machines of a run that waits for its turn."""


class Staffing:
    """Says which workers may be hired, and which ones have to leave.

    Args:
        job: the job file.
        run: name of the run.
        actors: actors of the run, with their leases.

    """

    def __init__(self, job: Job, run: str, actors: RunActors) -> None:
        self._job, self._actors, self._exchange = job, actors, ExchangeClient(job, run)
        self.begun = False
        """Whether this scheduler has committed a round."""

    async def workers_to_hire(self, past: ResumePoint) -> list[int]:
        """Numbers of the workers that may be hired now; without an exchange, a resumed run waits while it goes on.

        Raises:
            CapacityError: there are too few for a start, at an open exchange even after `max_idle_s` seconds.

        """
        resumed = past.attempt > 1 or past.next_round > 0
        deadline = time.monotonic() + self._job.resources.max_idle_s
        least = min(self._job.resources.min_workers, self._job.num_workers)
        while True:
            ruling = await self._attend()
            numbers, error = await self._fitting(ruling)
            if (error is None and len(numbers) >= least) or (ruling is None and resumed):
                return numbers
            if ruling is None or time.monotonic() > deadline:
                fix = "raise resources.worker_price.bid, or wait"
                raise error or CapacityError("CFG004", "other runs of the exchange bid more, or came first", fix=fix)
            await asyncio.sleep(AGAIN_S)

    async def leaving(self) -> dict[int, str]:
        """Reasons of the workers that are to leave their machines soon.

        Raises:
            OutbidError: this scheduler has no commit yet, and loses so many workers that it can't go on.

        """
        await self._attend()
        if self._exchange.is_outbid and not self.begun:
            what = "other runs of the exchange bid more, or came first; waiting for its turn"
            raise OutbidError("CAP005", what, fix="raise resources.worker_price.bid, or wait")
        return await self._actors.leaving()

    async def _attend(self) -> Ruling | None:
        ruling = await self._exchange.attend(self.begun)
        self._actors.leases.obey(ruling)
        return ruling

    async def _fitting(self, ruling: Ruling | None) -> tuple[list[int], CapacityError | None]:
        try:
            nodes, speeds = await asyncio.to_thread(lambda: (self._actors.nodes(), self._actors.leases.speeds()))
            numbers = workers_to_hire(self._job, nodes, own_node(), speeds)
        except CapacityError as error:
            return [], error
        if ruling is not None:
            needs = worker_needs(self._job)
            late = [number for number in numbers if needs[number].bundle()][ruling.quota :]
            numbers = [number for number in numbers if number not in late]
        return numbers, None
