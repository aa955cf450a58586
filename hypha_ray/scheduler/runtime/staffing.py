"""Workers that a run may have: those that find room on acceptable terms, within its quota at an exchange."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from hypha_ray.config import Job
from hypha_ray.errors import CapacityError, OutbidError
from hypha_ray.market.exchange.allotment import Ruling
from hypha_ray.market.exchange.client import ExchangeClient
from hypha_ray.market.nodes import own_node
from hypha_ray.market.requirements import Need, worker_needs
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
        self._job = job
        self._actors = actors
        self._exchange = ExchangeClient(job, run)
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
                raise error or self._refusal(ruling, least)
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
        ruling = await self._exchange.attend(self.begun, self._actors.leases.since_s)
        self._actors.leases.obey(ruling)
        return ruling

    async def _fitting(self, ruling: Ruling | None) -> tuple[list[int], CapacityError | None]:
        try:
            nodes, speeds = await asyncio.to_thread(lambda: (self._actors.nodes(), self._actors.leases.speeds()))
            numbers = workers_to_hire(self._job, nodes, own_node(), speeds)
        except CapacityError as error:
            return [], error
        if ruling is not None:
            numbers = within(ruling, numbers, worker_needs(self._job))
        return numbers, None

    def _refusal(self, ruling: Ruling | None, least: int) -> CapacityError:
        """The reason that an exchange allows too few workers although machines for them are free."""
        fix = "raise resources.worker_price.bid, or wait"
        if ruling is not None and ruling.behind is not None:
            what = f"another run of the exchange, {ruling.behind}, bids more or came first"
            return CapacityError("CFG004", what, fix=fix)
        bid = self._job.resources.worker_price.public_bid
        quota = 0 if ruling is None else ruling.quota
        what = f"machines whose owners take a bid of {bid:g} have room for {quota} of {least} workers"
        return CapacityError("CFG004", what, fix=fix)


def within(ruling: Ruling, numbers: Sequence[int], needs: Sequence[Need]) -> list[int]:
    """Numbers of the workers that a ruling allows: as many of each need as it says, the first in front.

    Args:
        ruling: quota of the run.
        numbers: numbers of the workers that find room.
        needs: needs of all workers; one that reserves nothing is always allowed.

    """
    held = Counter[Need]()
    allowed = list[int]()
    for number in numbers:
        need = needs[number]
        if not need.bundle():
            allowed.append(number)
        elif ruling.allows(need, held):
            allowed.append(number)
            held[need] += 1
    return allowed
