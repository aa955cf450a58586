"""A run's dealings with the market: workers that it may have, bills of its leases, and speeds that it has measured."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayError

from hypha_ray.config import Job
from hypha_ray.errors import CapacityError, OutbidError
from hypha_ray.market.allotment import Ruling
from hypha_ray.market.auction import AuctionClient
from hypha_ray.market.buyer import request_of, workers_to_hire
from hypha_ray.market.cluster import cluster_nodes, lease_entries, own_node, post_speeds
from hypha_ray.market.leases import Offer, answers, is_firm
from hypha_ray.market.requirements import Need, NodeResources, worker_needs
from hypha_ray.market.selection import Speeds, places, training_key
from hypha_ray.scheduler.messages import Quote, Quotes, ResumePoint
from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.telemetry_client import TelemetryClient
from hypha_ray.telemetry.sinks.files import EVENTS, read_jsonl
from hypha_ray.types import Delta, Event, Source

AGAIN_S = 1.0
"""Seconds between two looks for machines of a run that waits for its turn."""
PUBLISH_INTERVAL_S = 10.0
"""Least seconds between two publications."""
MIN_CHANGE = 0.05
"""Least relative change of a speed that is published."""


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
        self._auction = AuctionClient(job, run)
        self.begun = False
        """Whether this scheduler has committed a round."""

    async def workers_to_hire(self, resume_point: ResumePoint) -> list[int]:
        """Numbers of the workers that may be hired now; without an auction, a resumed run begins with too few.

        Raises:
            CapacityError: there are too few for a start, at an open auction even after `max_idle_s` seconds.

        """
        resumed = resume_point.attempt > 1 or resume_point.next_round > 0
        deadline = time.monotonic() + self._job.resources.max_idle_s
        least_workers = min(self._job.resources.min_workers, self._job.num_workers)
        while True:
            ruling = await self._attend()
            numbers, error = await self._workers_with_room(ruling)
            if (error is None and len(numbers) >= least_workers) or (ruling is None and resumed):
                return numbers
            if ruling is None or time.monotonic() > deadline:
                raise error or self._refusal(ruling, least_workers)
            await asyncio.sleep(AGAIN_S)

    async def leaving(self) -> dict[int, str]:
        """Reasons of the workers that are to leave their machines soon.

        Raises:
            OutbidError: this scheduler has no commit yet, and loses so many workers that it can't go on.

        """
        await self._attend()
        if self._auction.is_outbid and not self.begun:
            problem = "other runs of the exchange bid more, or came first; waiting for its turn"
            raise OutbidError("CAP005", problem, fix="raise resources.worker_price.bid, or wait")
        return await self._actors.leaving()

    async def quotes(self, spent: float) -> Quotes:
        """Terms of the workers' machines and of free ones, for a run with a goal that has spent so much."""
        nodes = await asyncio.to_thread(self._actors.nodes)
        node_by_id = {node.id: node for node in nodes}
        workers = {}
        for worker in range(self._job.num_workers):
            name = f"worker-{worker}"
            if name in self._actors.leases.since_s:
                terms = self._actors.leases.terms(name)
                node = node_by_id.get(terms.get("node", ""))
                workers[worker] = Quote(terms.get("price", 0.0), node is None or is_firm(node))
        (need, *_) = worker_needs(self._job)
        offers: list[Quote] = []
        for answer in answers(request_of(self._job.resources, need), nodes):
            if isinstance(answer, Offer):
                offers += [Quote(answer.price, is_firm(answer.node))] * answer.capacity
        return Quotes(workers, offers, spent)

    async def _attend(self) -> Ruling | None:
        ruling = await self._auction.attend(self.begun, self._actors.leases.since_s)
        self._actors.leases.obey(ruling)
        return ruling

    async def _workers_with_room(self, ruling: Ruling | None) -> tuple[list[int], CapacityError | None]:
        try:
            nodes, speeds = await asyncio.to_thread(self._look_up)
            numbers = workers_to_hire(self._job, nodes, own_node(), speeds)
        except CapacityError as error:
            return [], error
        if ruling is not None:
            numbers = within(ruling, numbers, worker_needs(self._job))
        return numbers, None

    def _look_up(self) -> tuple[list[NodeResources], Speeds]:
        """Live nodes, and published speeds of the run's training."""
        nodes = self._actors.nodes()
        return nodes, self._actors.leases.speeds()

    def _refusal(self, ruling: Ruling | None, least_workers: int) -> CapacityError:
        """The reason that an auction allows too few workers although machines for them are free."""
        fix = "raise resources.worker_price.bid, or wait"
        if ruling is not None and ruling.behind is not None:
            problem = f"another run of the exchange, {ruling.behind}, bids more or came first"
            return CapacityError("CFG004", problem, fix=fix)
        bid = self._job.resources.worker_price.public_bid
        quota = 0 if ruling is None else ruling.quota
        problem = f"machines whose owners take a bid of {bid:g} have room for {quota} of {least_workers} workers"
        return CapacityError("CFG004", problem, fix=fix)


def within(ruling: Ruling, numbers: Sequence[int], needs: Sequence[Need]) -> list[int]:
    """Numbers of the workers that a ruling allows: as many of each need as it says, the first in front.

    Args:
        ruling: quota of the run.
        numbers: numbers of the workers that find room.
        needs: needs of all workers; one that reserves nothing is always allowed.

    """
    taken_by_need = Counter[Need]()
    allowed = list[int]()
    for worker in numbers:
        need = needs[worker]
        if not need.bundle():
            allowed.append(worker)
        elif ruling.allows(need, taken_by_need):
            allowed.append(worker)
            taken_by_need[need] += 1
    return allowed


class CostBook:
    """Bills the leases of a run.

    Args:
        actors: actors of the run, with their leases.
        telemetry: takes bills as events.
        directory: the run directory, with events of earlier attempts.
        has_goal: whether the run has a goal, for which it has to know all that was paid.

    """

    def __init__(self, actors: RunActors, telemetry: TelemetryClient, directory: Path, has_goal: bool) -> None:
        self._has_goal = has_goal
        self._actors = actors
        self._telemetry = telemetry
        self._events = directory / EVENTS
        self._billed = 0.0
        """Sum of all bills of the run; without a goal, of this attempt."""

    async def recall(self) -> None:
        """Read what earlier schedulers have billed, and up to which time, for leases that were taken over."""
        if not (self._has_goal or self._actors.leases.pays):
            return
        bills = await asyncio.to_thread(read_jsonl, self._events, ("cost",))
        self._billed = sum(bill["cost"] for bill in bills)
        if self._actors.leases.pays:
            last_bill_at = max((bill["monotonic_s"] for bill in bills), default=0.0)
            self._actors.leases.billed(last_bill_at)

    @property
    def spent(self) -> float:
        """Cost of the run up to now."""
        return self._billed + self._actors.leases.owed()

    def bill(self) -> dict[str, float]:
        """Cost since the last bill, as a field of a record; empty if no owner has terms."""
        cost = self._actors.leases.bill()
        if cost is None:
            return {}
        self._billed += cost
        self._telemetry.note("cost", cost=cost)
        return {"cost": cost}


@dataclass(slots=True)
class _Measured:
    """Samples of a worker, and seconds in which it has computed them; its first round counts as warm-up."""

    samples: int = 0
    seconds: float = 0.0
    published: float = 0.0
    """Speed published last."""

    @property
    def speed(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def has_changed(self) -> bool:
        return abs(self.speed - self.published) > MIN_CHANGE * self.published


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
        self._publish_at = 0.0
        """Monotonic time of the next publication at the earliest."""

    def open(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Key of the training, whose samples have tensors of these shapes."""
        self._training = training_key(self._job, shapes)
        return self._training

    def count(self, event: Event) -> None:
        """Count what a worker has trained on in a round."""
        if not isinstance(event, Delta) or self._job.group_of(event.source.worker).bridged:
            return
        if event.source not in self._measured:
            self._measured[event.source] = _Measured()
            return
        measured_worker = self._measured[event.source]
        measured_worker.samples += event.samples
        measured_worker.seconds += max(0.0, event.train_s - event.data_wait_s)

    async def publish(self) -> None:
        """Publish the speeds that have changed, of workers that are still there."""
        for source in list(self._measured):
            if not self._is_there(source):
                del self._measured[source]
        changed: list[_Measured] = []
        speeds: dict[str, float] = {}
        for source, measured_worker in self._measured.items():
            if measured_worker.has_changed:
                changed.append(measured_worker)
                speeds[f"worker-{source.worker}"] = measured_worker.speed
        if changed and time.monotonic() >= self._publish_at:
            self._publish_at = time.monotonic() + PUBLISH_INTERVAL_S
            with suppress(RayError):  # The control service doesn't answer: a later round publishes them.
                await asyncio.to_thread(self._write, speeds)
                for measured_worker in changed:
                    measured_worker.published = measured_worker.speed

    def _is_there(self, source: Source) -> bool:
        worker = self._actors.worker(source.worker)
        return worker is not None and worker[1] == source

    def _write(self, speeds: Mapping[str, float]) -> None:
        """Write speeds, which come by name of the lease."""
        nodes = {node.id: node for node in cluster_nodes()}
        speed_by_place: dict[str, float] = {}
        for entry in lease_entries(self._run):
            if entry.name in speeds and entry.node in nodes:
                leased_gpus = places(nodes[entry.node], entry.amounts)
                speed_by_place |= dict.fromkeys(leased_gpus, speeds[entry.name])
        post_speeds(str(self._training), speed_by_place)
