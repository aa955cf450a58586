"""The actors of a run: where they are placed, what they are called, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config import Job
from hypha_ray.data.actor import DataShard
from hypha_ray.errors import ClusterError
from hypha_ray.market.allocator import Lease, Leases, draining_nodes
from hypha_ray.market.requirements import Need, server_need, worker_need
from hypha_ray.scheduler.post import Post
from hypha_ray.server.actor import ParameterServer
from hypha_ray.store.actor import Store
from hypha_ray.telemetry.actor import Telemetry
from hypha_ray.types import Source
from hypha_ray.worker.actor import TrainWorker

NAME_S = 10.0
"""Longest wait for the name or lease of an actor that is being ended."""


class Crew:
    """Hires and dismisses actors. Leases are placement groups, one for each actor that reserves anything.

    Args:
        job: the job file.
        run: name of the run, which is the Ray namespace.
        directory: the run directory, on this node.
        dataset: folder of the prepared dataset, on this node.
        note: told the name and the reason when an actor is replaced.

    """

    def __init__(self, job: Job, run: str, directory: str, dataset: str, note: Callable[[str, str], None]) -> None:
        self._job, self._run, self._note = job, run, note
        self._leases = Leases(run)
        self._held: dict[str, Lease] = {}
        self.workers: dict[int, Any] = {}
        self._sources: dict[int, Source] = {}
        sinks, config = job.telemetry.sinks, job.model_dump(mode="json", exclude={"model": {"token"}})
        writer = (directory, sinks, run, config, job.telemetry.aim_repository, job.testing)
        keeper = (directory, job.checkpoint, job.rounds.update_rounds, job.testing)
        self.telemetry = self._post("telemetry", partial(self._here, Telemetry, "telemetry", *writer))
        self.store = self._post("store", partial(self._here, Store, "store", *keeper))
        self.shards = [
            self._post(name, partial(self._here, DataShard, name, dataset, job.testing))
            for name in (f"shard-{number}" for number in range(job.dataset.shards))
        ]
        self.servers = [
            self._post(name, partial(self._serve, name))
            for name in (f"server-{fragment}" for fragment in range(job.sync.fragments))
        ]

    async def hire(self, source: Source) -> Any:
        """Lease a machine and start a worker there; returns its stream of events.

        Raises:
            CapacityError: there was no room by the start deadline.
            ClusterError: Ray refuses.

        """
        name = f"worker-{source.worker}"
        options = await self._place(name, worker_need(self._job))
        cls = ray.remote(concurrency_groups={"control": 1}, allow_out_of_order_execution=True)(TrainWorker)
        worker = await self._named(cls, name, options, self._job, source)
        self.workers[source.worker], self._sources[source.worker] = worker, source
        return worker.run.remote()

    def dismiss(self, worker: int) -> None:
        """End a worker and give its lease back, which ends even a process that is stopped."""
        handle = self.workers.pop(worker, None)
        self._sources.pop(worker, None)
        self._give_back(f"worker-{worker}")
        if handle is not None:
            ray.kill(handle)

    def employs(self, source: Source) -> bool:
        """Whether this very worker is still there."""
        return self._sources.get(source.worker) == source

    def draining(self) -> tuple[int, ...]:
        """Workers on nodes that Ray is about to take away."""
        nodes = draining_nodes()
        leases = {worker: self._held.get(f"worker-{worker}") for worker in self.workers} if nodes else {}
        return tuple(w for w, lease in leases.items() if lease is not None and self._leases.node(lease) in nodes)

    def end(self) -> None:
        """End every actor and every lease of the run."""
        for worker in list(self.workers):
            self.dismiss(worker)
        for post in [*self.servers, *self.shards, self.store, self.telemetry]:
            post.close()
        self._leases.release_all()

    def _post(self, name: str, start: Callable[[], Any]) -> Post:
        end = partial(self._end, name)
        return Post(name, start, end, self._job.worker.lease_s, self._job.resources.start_deadline_s, self._note)

    def _end(self, name: str, actor: Any) -> None:
        self._give_back(name)
        ray.kill(actor)

    def _give_back(self, name: str) -> None:
        lease = self._held.pop(name, None)
        if lease is not None:
            self._leases.release(lease)

    async def _serve(self, name: str) -> Any:
        options = await self._place(name, server_need(self._job))
        return await self._named(_pulsing(ParameterServer), name, options, self._job)

    async def _place(self, name: str, need: Need) -> dict[str, Any]:
        """Options that place an actor; waits for the end of a lease of the same name."""
        if not need.bundle():
            return {"num_cpus": 0}
        self._give_back(name)
        deadline = time.monotonic() + NAME_S
        while True:
            try:
                lease = await self._leases.acquire(name, need, self._job.resources.start_deadline_s)
                break
            except ClusterError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
        self._held[name] = lease
        return self._leases.options(lease)

    async def _here(self, cls: type, name: str, *arguments: Any) -> Any:
        """Start an actor on this node, where the run directory and the dataset are."""
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return await self._named(_pulsing(cls), name, {"num_cpus": 0, "scheduling_strategy": node}, *arguments)

    async def _named(self, cls: Any, name: str, options: dict[str, Any], *arguments: Any) -> Any:
        """Start an actor under its name, with no repetition that Ray would do on its own; waits for the name."""
        options = {"name": name, "namespace": self._run, "max_restarts": 0, "max_task_retries": 0, **options}
        deadline = time.monotonic() + NAME_S
        while True:
            try:
                return cls.options(**options).remote(*arguments)
            except ValueError as error:  # The name is taken: its last owner is being ended.
                if time.monotonic() > deadline:
                    raise ClusterError("NET005", f"the actor name {name} is taken", got=str(error)) from None
                await asyncio.sleep(0.1)


def _pulsing(cls: type) -> Any:
    """An actor class that answers `ping` while it works."""
    return ray.remote(concurrency_groups={"pulse": 1})(cls)
