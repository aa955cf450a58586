"""The actors of a run: where they are placed, what they are called, and how they end."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config import Job
from hypha_ray.data.actor import DataShard
from hypha_ray.market.allocator import Lease, Leases, cluster_nodes
from hypha_ray.market.requirements import Need, server_need, worker_need, workers_to_start
from hypha_ray.server.actor import ParameterServer
from hypha_ray.store.actor import Store
from hypha_ray.telemetry.actor import Telemetry
from hypha_ray.types import Source
from hypha_ray.worker.actor import TrainWorker


class Crew:
    """Hires and dismisses actors. Leases are placement groups, one for each actor that reserves anything.

    Args:
        job: the job file.
        run: name of the run, which is the Ray namespace.
        directory: the run directory, on this node.

    """

    def __init__(self, job: Job, run: str, directory: str) -> None:
        self._job, self._run, self._directory = job, run, directory
        self._leases = Leases(run)
        self._held: dict[int, Lease] = {}
        self.workers: dict[int, Any] = {}
        self.sources: list[Source] = []
        self.shards: list[Any] = []
        self.servers: list[Any] = []
        self.store = self._here(Store, "store", directory, job.checkpoint, job.rounds.update_rounds)
        sinks, config = job.telemetry.sinks, job.model_dump(mode="json", exclude={"model": {"token"}})
        self.telemetry = self._here(Telemetry, "telemetry", directory, sinks, run, config, job.telemetry.aim_repository)

    def open_shards(self, folder: str) -> None:
        """Start the data shards, on this node: they serve its folder."""
        count = self._job.dataset.shards
        self.shards = [self._here(DataShard, f"shard-{number}", folder) for number in range(count)]

    async def hire(self) -> None:
        """Lease machines and start servers and workers; fewer workers than wanted if the job allows that.

        Raises:
            CapacityError: not even `min_workers` could be placed by the start deadline.

        """
        count = workers_to_start(self._job, await asyncio.to_thread(cluster_nodes))
        for fragment in range(self._job.sync.fragments):
            options = await self._place(f"server-{fragment}", server_need(self._job))
            self.servers.append(
                self._actor(ray.remote(ParameterServer), f"server-{fragment}", options).remote(self._job)
            )
        await asyncio.gather(*(self._hire_worker(number) for number in range(count)))
        self.sources.sort(key=lambda source: source.worker)

    async def _hire_worker(self, number: int) -> None:
        options = await self._place(f"worker-{number}", worker_need(self._job), number)
        source = Source(self._run, number, 0)
        cls = ray.remote(concurrency_groups={"control": 1}, allow_out_of_order_execution=True)(TrainWorker)
        self.workers[number] = self._actor(cls, f"worker-{number}", options).remote(self._job, source)
        self.sources.append(source)

    async def _place(self, name: str, need: Need, worker: int | None = None) -> dict[str, Any]:
        if not need.bundle():
            return {"num_cpus": 0}
        lease = await self._leases.acquire(name, need, self._job.resources.start_deadline_s)
        if worker is not None:
            self._held[worker] = lease
        return self._leases.options(lease)

    def dismiss(self, worker: int) -> None:
        """End a worker and give its lease back."""
        handle, lease = self.workers.pop(worker, None), self._held.pop(worker, None)
        if handle is not None:
            ray.kill(handle)
        if lease is not None:
            self._leases.release(lease)

    def end(self) -> None:
        """End every actor and every lease of the run."""
        for worker in list(self.workers):
            self.dismiss(worker)
        for handle in [*self.servers, *self.shards, self.store, self.telemetry]:
            ray.kill(handle)
        self._leases.release_all()

    def _here(self, cls: type, name: str, *arguments: Any) -> Any:
        """Start an actor on this node, where the run directory and the dataset are."""
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return self._actor(ray.remote(cls), name, {"num_cpus": 0, "scheduling_strategy": node}).remote(*arguments)

    def _actor(self, cls: Any, name: str, options: dict[str, Any]) -> Any:
        """An actor class with the options that all have: a name, and no repetition that Ray would do on its own."""
        return cls.options(name=name, namespace=self._run, max_restarts=0, max_task_retries=0, **options)
