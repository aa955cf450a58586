"""Places of payloads, from a worker's word to a server: on its own node, on the server's, and never the scheduler's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.runtime.global_weights import GlobalWeights
from hypha_ray.scheduler.runtime.run_actors import ActorOwner
from hypha_ray.scheduler.runtime.supervised_actor import SupervisedActor
from hypha_ray.scheduler.runtime.telemetry_client import RoundTraces
from hypha_ray.scheduler.runtime.worker_dispatcher import WorkerDispatcher
from hypha_ray.types import Alive, Delta, Flat, Left, Source, Span
from tests.support.clusters import cluster_of

WAIT_S = 60.0
GROUP, ELEMENTS = "parameters/float32", 10_000_000
ME = Source("run", 1, 10_001)
DELTA = Delta(
    source=ME,
    round=1,
    spans=(Span(0, 0, 0, 4),),
    samples=4,
    tokens=None,
    scored=4,
    batches=1,
    loss=1.0,
    fragments=1,
    payload_bytes=4 * ELEMENTS,
    train_s=1.0,
    data_wait_s=0.0,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The scheduler's node, one for a worker and one for a server."""
    nodes = [{"num_cpus": 1, "resources": {place: 1}} for place in ("worker", "server")]
    with cluster_of(nodes, namespace="run", shared={"object_store_memory": 300_000_000}) as found:
        yield found


@ray.remote(num_cpus=0, resources={"worker": 1})
class Worker:
    """Says what a worker does at the end of a round; a large payload takes its time to be stored."""

    @ray.method(num_returns="streaming")  # type: ignore[untyped-decorator]
    def run(self, storing_s: float, leaves: bool) -> Iterator[Any]:
        yield DELTA
        time.sleep(storing_s)
        yield {GROUP: np.ones(ELEMENTS, np.float32)}
        yield Alive(ME)
        if leaves:
            yield Left(ME)

    def late(self) -> Flat:
        time.sleep(WAIT_S)
        return {}


class SliceCache:
    """Knows nothing of places."""

    async def locate(self, worker: int) -> None:
        pass


class TelemetryClient:
    """Is told nothing of interest."""

    def note(self, kind: str, **fields: Any) -> None:
        pass


class RunActors:
    """One worker that is there, and a server that may not be."""

    def __init__(self, stream: Any, server: SupervisedActor | None = None) -> None:
        self._stream, self.servers, self.store = stream, [server], None

    def bridges(self, number: int) -> bool:
        return False

    def terms(self, number: int) -> dict[str, Any]:
        return {}

    async def hire(self, source: Source) -> tuple[Any, bool]:
        return self._stream, False


class Unheeding(GlobalWeights):
    """Nobody asks for payloads yet."""

    async def fetch(self, round_number: int, payloads: list[Any]) -> None:
        pass


def start_server(owner: Any, name: str, **testing: Any) -> Any:
    """A server as the scheduler has it started, on a node of its own."""
    job = Job.model_validate({"testing": testing})
    options = {"name": name, "num_cpus": 0, "resources": {"server": 0.1}}
    return ray.get(owner.start.remote("server", options, job), timeout=WAIT_S)


def node_of(place: str) -> str:
    return next(node["NodeID"] for node in ray.nodes() if place in node["Resources"])


def places(ref: Any) -> set[str]:
    return set(get_object_locations([ref])[ref]["node_ids"])


def listen(
    actors: RunActors, weights: GlobalWeights, heard: Callable[[WorkerDispatcher, c.Input], None], until: type
) -> WorkerDispatcher:
    """Let a dispatcher listen to the worker until it has heard something of that kind."""

    async def run() -> WorkerDispatcher:
        tasks, over = set[asyncio.Task[None]](), asyncio.Event()

        def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = asyncio.get_running_loop().create_task(coroutine)
            tasks.add(task)
            return task

        def inbox(event: c.Input) -> None:
            heard(dispatcher, event)
            if isinstance(event, until):
                over.set()

        traces = RoundTraces(Job(), attempt=1)
        telemetry: Any = TelemetryClient()
        slices: Any = SliceCache()
        dispatcher = WorkerDispatcher(actors, weights, slices, telemetry, inbox, spawn, traces)
        dispatcher.hire(ME)
        await asyncio.wait_for(over.wait(), WAIT_S)
        return dispatcher

    return asyncio.run(run())


def payload_of(dispatcher: WorkerDispatcher) -> Any:
    """Ref of the payload that was handed over."""
    return dispatcher.payloads(c.Reduce(1, (ME,), (4,)))[0][0]


@pytest.mark.parametrize("storing_s", [0.0, 0.2, 1.0])
def test_scheduler_takes_a_payload_off_the_stream_and_has_no_copy_of_it(cluster: Cluster, storing_s: float) -> None:
    worker = Worker.remote()
    actors = RunActors(worker.run.remote(storing_s, False))
    weights = Unheeding(Job.model_validate({}), actors)  # type: ignore[arg-type]
    dispatcher = listen(actors, weights, lambda dispatcher, event: None, Delta)
    assert places(payload_of(dispatcher)) == {node_of("worker")}
    ray.kill(worker)


def test_server_has_a_leavers_payload_before_its_leave_is_heard(cluster: Cluster) -> None:
    owner = ray.remote(num_cpus=0)(ActorOwner).remote()
    server, worker, notes = start_server(owner, "server-0"), Worker.remote(), list[str]()
    there: list[set[str]] = []

    async def start() -> Any:
        return server

    post = SupervisedActor("server-0", start, ray.kill, 5.0, WAIT_S, lambda name, reason: notes.append(reason))
    actors = RunActors(worker.run.remote(0.0, True), post)

    def heard(dispatcher: WorkerDispatcher, event: c.Input) -> None:
        if isinstance(event, Left):
            there.append(places(payload_of(dispatcher)))

    listen(actors, GlobalWeights(Job.model_validate({}), actors), heard, Left)  # type: ignore[arg-type]
    assert there == [{node_of("worker"), node_of("server")}] and not notes
    ray.kill(worker)
    ray.kill(server)


def test_server_that_takes_a_step_takes_payloads_in_and_says_that_it_lives(cluster: Cluster, tmp_path: Path) -> None:
    owner = ray.remote(num_cpus=0)(ActorOwner).remote()
    testing = {"failpoints": ["server.before_reduce=pause@*"], "failpoint_log": str(tmp_path / "hits.jsonl")}
    server, payload = start_server(owner, "busy", **testing), {GROUP: np.ones(4, np.float32)}
    ray.get(server.receive.remote(payload), timeout=WAIT_S)
    step = server.reduce.remote(None, payload, payload)[-1]
    assert ray.wait([step, server.receive.remote(payload)], timeout=WAIT_S)[0] != [step]
    assert ray.wait([step, server.ping.remote()], timeout=WAIT_S)[0] != [step]
    ray.kill(server)


def test_server_whose_payload_is_long_on_its_way_says_that_it_lives(cluster: Cluster) -> None:
    owner = ray.remote(num_cpus=0)(ActorOwner).remote()
    server, worker = start_server(owner, "waiting"), Worker.remote()
    receipt = server.receive.remote(worker.late.remote())
    assert ray.get(server.ping.remote(), timeout=WAIT_S / 2)
    assert not ray.wait([receipt], timeout=0)[0]
    ray.kill(worker)
    ray.kill(server)
