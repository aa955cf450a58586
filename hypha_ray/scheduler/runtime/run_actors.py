"""Placement, names and ends of a run's actors, and the owner of those that outlive a scheduler.

Ray ends an actor with the process that started it:

    driver ──owns──► owner ──owns──► workers, parameter servers        They end with the driver, not with a scheduler.
       └────owns──► scheduler ──owns──► store, data shards, telemetry

The owner only starts actors and keeps their handles. Ray restarts it if it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.children import ListedActor
from hypha_ray.config import Job
from hypha_ray.data.actor import READS_AT_ONCE, DataShard
from hypha_ray.errors import CapacityError, ClusterError
from hypha_ray.market.allocator import Lease, Leases
from hypha_ray.market.cluster import draining_nodes, on_this_node
from hypha_ray.market.requirements import (
    Need,
    NodeResources,
    generator_need,
    generators_with_room,
    server_need,
    worker_needs,
)
from hypha_ray.rl.actor import GROUPS as GENERATOR_GROUPS
from hypha_ray.rl.actor import ResponseGenerator
from hypha_ray.rl.generator_pool import generator_name
from hypha_ray.scheduler.runtime.supervised_actor import SupervisedActor, value
from hypha_ray.server import actor as server_actor
from hypha_ray.server.actor import ParameterServer
from hypha_ray.store.actor import GROUPS, Store
from hypha_ray.telemetry.actor import Telemetry
from hypha_ray.texts import redacted_tree
from hypha_ray.traces import FLUSH_S, flush
from hypha_ray.types import Source
from hypha_ray.worker.actor import BridgedWorker, FromDataset, TrainWorker

OWNER = "owner"
"""Name of the owner in the namespace of the run."""
NAME_S = 10.0
"""Longest wait for the name or lease of an actor that is being ended."""
GENERATOR_S = 10.0
"""Longest wait for the lease of a generator, in seconds: there was room just before."""
TAKEOVER_S = 3.0
"""Longest wait for the answer of an actor that the previous scheduler left, in seconds."""


@cache
def actor_class(role: str) -> Any:
    """Actor class of a server, or of a kind of worker, with the concurrency groups that its methods need.

    Ray draws a random id for it, so it isn't made as this module is loaded: processes may be forked afterwards.

    Args:
        role: ``server``, ``generator``, or the kind of a worker: ``train``, or ``bridged`` if its trainer runs outside
            Ray.

    """
    if role == "server":
        return ray.remote(concurrency_groups=server_actor.GROUPS, allow_out_of_order_execution=True)(ParameterServer)
    if role == "generator":
        return ray.remote(concurrency_groups=GENERATOR_GROUPS)(ResponseGenerator)
    worker = {"train": TrainWorker, "bridged": BridgedWorker}[role]
    return ray.remote(concurrency_groups={"control": 1}, allow_out_of_order_execution=True)(worker)


class ActorOwner(ListedActor):
    """Starts actors and keeps their handles."""

    def __init__(self) -> None:
        self._actor_by_name: dict[str, Any] = {}
        """Latest actor of each name; Ray ends an actor whose last handle is gone."""

    def ping(self) -> int:
        """Return the process id, as a sign of life."""
        return os.getpid()

    def start(self, role: str, options: dict[str, Any], *arguments: Any) -> Any:
        """Start an actor under the name in its options; return its handle.

        Args:
            role: as `actor_class` takes it.
            options: Ray options of the actor.
            arguments: arguments of its constructor; small, because Ray keeps them as long as the actor.

        Raises:
            ValueError: the name is taken.

        """
        actor = actor_class(role).options(**options).remote(*arguments)
        self._actor_by_name[options["name"]] = actor
        return actor


def outliving(job: Job) -> dict[str, Need]:
    """Return the needs of the actors that outlive a scheduler, by name."""
    needs = {f"worker-{number}": need for number, need in enumerate(worker_needs(job))}
    for fragment in range(job.sync.fragments):
        needs[f"server-{fragment}"] = server_need(job)
    for number in range(job.rl.generators):
        needs[generator_name(number)] = generator_need(job)
    return needs


class RunActors:
    """Starts and ends the actors of a run. A lease is a placement group for one actor that reserves resources.

    Workers and parameter servers outlive a scheduler, with their leases. The next one takes them over if they answer.

    Args:
        job: the job file.
        run: name of the run, which is the Ray namespace.
        directory: the run directory, on this node.
        owner: actor that starts the actors which outlive this scheduler.
        note: takes name and reason of each replaced actor.
        from_dataset: description of the dataset for workers, as `TrainWorker` takes it.

    """

    notices: Mapping[str, str] = {}
    """Reason of each parameter server that is to leave its machine soon, by name."""

    def __init__(
        self,
        job: Job,
        run: str,
        directory: str,
        owner: Any,
        note: Callable[[str, str], None],
        from_dataset: FromDataset = (None, None),
    ) -> None:
        self._job = job
        self._run = run
        self._owner = owner
        self._note = note
        self._from_dataset = from_dataset
        self.leases = Leases(run, job.resources)
        self._lease_by_name: dict[str, Lease] = {}
        self._needs = outliving(job)
        self._left_over = dict.fromkeys(self._needs) | self.leases.adopt(self._needs)
        """Lease by name of each actor that the previous scheduler may have left; None without a lease."""
        self._workers: dict[int, tuple[Any, Source]] = {}
        self._nodes: dict[Source, str | None] = {}
        """Id of the node of each worker that has been looked up."""
        config = redacted_tree(job.model_dump(mode="json", exclude={"model": {"token"}}))
        for_telemetry = (directory, job.telemetry, run, config, job.testing)
        for_store = (directory, job.checkpoint, job.rounds, job.testing, job.telemetry.sinks)
        self.telemetry = self._supervise("telemetry", partial(self._start_here, Telemetry, "telemetry", *for_telemetry))
        self.store = self._supervise("store", partial(self._start_here, Store, "store", *for_store))
        self.shards: list[SupervisedActor] = []
        """Shards of all datasets."""
        self.servers: list[SupervisedActor] = []
        for fragment in range(job.sync.fragments):
            name = f"server-{fragment}"
            self.servers.append(self._supervise(name, partial(self._start_server, name)))

        self.generators: list[SupervisedActor] = []
        self._placement_lock = asyncio.Lock()
        """Held while a generator looks for room: two of them don't count on the same."""
        for number in range(job.rl.generators):
            name = generator_name(number)
            self.generators.append(self._supervise(name, partial(self._start_generator, name)))

    async def hire(self, source: Source) -> tuple[Any, bool]:
        """Take over the worker of a number, or lease a machine and start one there.

        Returns:
            Its stream of events, and whether it was taken over.

        Raises:
            CapacityError: there was no room by the start deadline.
            ClusterError: Ray refuses.

        """
        name = f"worker-{source.worker}"
        worker = await self._take_over(name, lambda actor: actor.reset.remote(source))
        is_taken_over = worker is not None
        if worker is None:
            group = self._job.group_of(source.worker)
            if group.dials_in:  # The trainer has to find its worker: token and address are here.
                options = on_this_node()
            else:
                options = await self._place(name, self._job.processes_of(source.worker))
            worker = await self._start_owned(group.kind, name, options, self._job, source, *self._from_dataset)
        self._workers[source.worker] = worker, source
        return worker.run.remote(source), is_taken_over

    def dismiss(self, worker: int) -> None:
        """End a worker and release its lease, which ends even a stopped process."""
        handle, _ = self._workers.pop(worker, (None, None))
        self._give_back(f"worker-{worker}")
        if handle is not None:
            ray.kill(handle)

    def bridges(self, worker: int) -> bool:
        """Whether the trainer of a worker runs outside Ray."""
        return self._job.group_of(worker).bridged

    def worker(self, worker: int) -> tuple[Any, Source] | None:
        """Handle and incarnation of a worker; None without one."""
        return self._workers.get(worker)

    def shards_of(self, folder: str) -> list[SupervisedActor]:
        """Further shards, which read a folder of this node."""
        shards: list[SupervisedActor] = []
        for _ in range(self._job.dataset.shards):
            name = f"shard-{len(self.shards) + len(shards)}"
            start = partial(self._start_here, DataShard, name, folder, self._job.testing)
            shards.append(self._supervise(name, start))
        self.shards += shards
        return shards

    def shard_near(self, node_id: str | None, url: str) -> SupervisedActor:
        """A further shard, which reads a URL on a node, or on another one if that is gone; None: on this node."""
        name = f"shard-{len(self.shards)}"
        options = on_this_node()
        if node_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
        options["max_concurrency"] = READS_AT_ONCE
        arguments = (url, self._job.testing, self._job.dataset.cache_gb)
        shard = self._supervise(name, partial(self._start, DataShard, name, options, *arguments))
        self.shards.append(shard)
        return shard

    async def node_of(self, worker: int) -> str | None:
        """Id of the node that a worker is on; None without a lease of its own."""
        if worker not in self._workers:
            return None
        source = self._workers[worker][1]
        await self._look_nodes_up()
        return self._nodes[source]

    async def workers_by_node(self) -> dict[str, list[int]]:
        """Numbers of the workers on each node, by its id."""
        await self._look_nodes_up()
        workers: dict[str, list[int]] = {}
        for worker, (_, source) in self._workers.items():
            node = self._nodes.get(source)
            if node is not None:
                workers.setdefault(node, []).append(worker)
        return workers

    async def _look_nodes_up(self) -> None:
        """Look up the nodes of all workers that haven't been looked up, at once."""
        unknown_sources = [source for _, source in self._workers.values() if source not in self._nodes]
        if unknown_sources:
            node_by_lease = await asyncio.to_thread(self.leases.placed)
            for source in unknown_sources:
                self._nodes[source] = node_by_lease.get(f"worker-{source.worker}")

    def nodes(self) -> list[NodeResources]:
        """Live nodes, with the resources that would be free without this run."""
        return self.leases.nodes()

    def terms(self, worker: int) -> dict[str, Any]:
        """Node and price per hour of a worker's lease; nothing if its owner has no terms."""
        return self.leases.terms(f"worker-{worker}")

    async def leaving(self) -> dict[int, str]:
        """Reasons of the workers that are to leave their machines soon."""
        drained = await asyncio.to_thread(self._drained_leases)
        reasons = await self.leases.ending() | dict.fromkeys(drained, "its node is being drained")
        self.notices = {name: reason for name, reason in reasons.items() if name.startswith("server-")}
        workers = {f"worker-{worker}": worker for worker in self._workers}
        return {workers[name]: reason for name, reason in reasons.items() if name in workers}

    def _drained_leases(self) -> list[str]:
        """Names of the leases on nodes that Ray is draining."""
        nodes = draining_nodes()
        if not nodes:
            return []
        node_by_lease = self.leases.placed()
        return [name for name, node in node_by_lease.items() if node in nodes]

    def evict(self) -> None:
        """End the actors whose leases are over."""
        for name in self.leases.over():
            self._give_back(name)

    def end(self) -> None:
        """End every actor and every lease of the run."""
        for worker in list(self._workers):
            self.dismiss(worker)
        for actor in [*self.generators, *self.servers, *self.shards, self.store, self.telemetry]:
            actor.close()
        self.leases.release_all()

    async def flush_traces(self) -> None:
        """Let every process export its last spans, while it lives."""
        if "otel" not in self._job.telemetry.sinks:
            return
        actors = [worker for worker, _ in self._workers.values()]
        actors += [actor.living for actor in (*self.servers, self.store) if actor.living is not None]
        calls = [value(actor.flush_traces.remote()) for actor in actors]
        flushed = asyncio.gather(asyncio.to_thread(flush), *calls, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(flushed, FLUSH_S)

    def _supervise(self, name: str, start: Callable[[], Any]) -> SupervisedActor:
        end = partial(self._end, name)
        return SupervisedActor(name, start, end, self._job.lease_s, self._job.resources.start_deadline_s, self._note)

    def _end(self, name: str, actor: Any) -> None:
        self._give_back(name)
        ray.kill(actor)

    def _give_back(self, name: str) -> None:
        lease = self._lease_by_name.pop(name, None)
        if lease is not None:
            self.leases.release(lease)

    async def _start_server(self, name: str) -> Any:
        server = await self._take_over(name, lambda actor: actor.ping.remote())
        if server is None:
            options = await self._place(name)
            server = await self._start_owned("server", name, options, self._job)
        return server

    async def _start_generator(self, name: str) -> Any:
        """Take a generator over, or start it where it has room beside the workers.

        Raises:
            CapacityError: there is none now.

        """
        generator = await self._take_over(name, lambda actor: actor.ping.remote())
        if generator is not None:
            return generator
        async with self._placement_lock:
            nodes = await asyncio.to_thread(self.nodes)
            leased_names = self._lease_by_name.keys() & {generator.name for generator in self.generators}
            room_count = generators_with_room(self._job, nodes)
            if room_count <= len(leased_names):
                problem = (
                    f"the cluster has room for {room_count} of {self._job.rl.generators} generators beside the workers"
                )
                raise CapacityError("CFG004", problem, fix="add nodes")
            options = await self._place(name, wait_s=GENERATOR_S)
        tokenizer, _ = self._from_dataset
        generator = await self._start_owned("generator", name, options, self._job, tokenizer)
        generator.prepare.remote()  # The generator loads libraries while the workers do.
        return generator

    async def _take_over(self, name: str, ask: Callable[[Any], Any]) -> Any | None:
        """Actor that the previous scheduler left under a name; None if it has lost its lease or doesn't agree."""
        if name not in self._left_over:
            return None
        lease = self._left_over.pop(name)
        if lease is not None:
            self._lease_by_name[name] = lease
        needs_lease = bool(self._needs[name].bundle())
        with contextlib.suppress(ValueError, RayError, TimeoutError):
            actor = ray.get_actor(name, namespace=self._run)
            is_placed = lease is not None or not needs_lease
            if is_placed and await asyncio.wait_for(value(ask(actor)), TAKEOVER_S):
                return actor
        self._give_back(name)
        self._kill(name)
        return None

    async def _place(self, name: str, parts: int = 1, wait_s: float | None = None) -> dict[str, Any]:
        """Ray options that place an actor on a part of a lease, after an earlier actor there has ended.

        Args:
            name: name of the actor.
            parts: number of parts.
            wait_s: longest wait for room in seconds; None: `resources.start_deadline_s`.

        """
        need = self._needs[name]
        if not need.bundle():
            return on_this_node()  # Not wherever Ray likes: a machine of the spot market would take θ with it.
        self._give_back(name)
        deadline = time.monotonic() + NAME_S
        start_deadline_s = self._job.resources.start_deadline_s if wait_s is None else wait_s
        while True:
            try:
                lease = await self.leases.acquire(name, need, start_deadline_s)
                break
            except ClusterError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
        self._lease_by_name[name] = lease
        return self.leases.options(lease, parts)

    async def _start_here(self, cls: type, name: str, *arguments: Any) -> Any:
        """Start an actor on this node, where the run directory is, and the dataset if it is in a folder."""
        return await self._start(cls, name, on_this_node(), *arguments)

    async def _start(self, cls: type, name: str, options: dict[str, Any], *arguments: Any) -> Any:
        """Start an actor that ends with this scheduler."""
        options = self._options(name, options)
        kind: dict[str, Any] = {"concurrency_groups": {"pulse": 1}}
        if cls is Store:  # A call whose objects are on their way holds up no other one.
            kind = {"concurrency_groups": GROUPS, "allow_out_of_order_execution": True}

        async def start() -> Any:
            actor_class = ray.remote(**kind)(cls)
            return actor_class.options(**options).remote(*arguments)

        return await self._start_named(name, start)

    async def _start_owned(self, role: str, name: str, options: dict[str, Any], *arguments: Any) -> Any:
        """Start an actor that outlives this scheduler."""
        options = self._options(name, options)

        async def start() -> Any:
            return await self._owner.start.remote(role, options, *arguments)

        return await self._start_named(name, start)

    def _options(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Ray options of an actor that Ray itself neither restarts nor retries."""
        return {"name": name, "namespace": self._run, "max_restarts": 0, "max_task_retries": 0, **options}

    async def _start_named(self, name: str, start: Callable[[], Awaitable[Any]]) -> Any:
        """Start an actor once its owner answers and its name is free; the actor that has the name is ended."""
        deadline = time.monotonic() + NAME_S
        while True:
            try:
                return await start()
            except (ValueError, RayActorError) as error:
                if time.monotonic() > deadline:
                    raise ClusterError("NET005", f"the actor {name} can't be started", got=str(error)) from None
            self._kill(name)
            await asyncio.sleep(0.1)

    def _kill(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # There is no such actor.
            ray.kill(ray.get_actor(name, namespace=self._run))
