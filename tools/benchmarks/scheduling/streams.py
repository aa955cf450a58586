"""The Ray side of a scheduler with hundreds of workers: their streams, the figures for telemetry and for the driver.

Workers don't train: a few actors play them, with many streams each. What the core makes of an event is another row.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

import ray

from hypha_ray.config import Job
from hypha_ray.config.training import Telemetry as TelemetrySettings
from hypha_ray.driver.ray_cluster import connected
from hypha_ray.scheduler.messages import Input, Lost
from hypha_ray.scheduler.runtime.supervised_actor import SupervisedActor
from hypha_ray.scheduler.runtime.telemetry_client import RoundTraces, TelemetryClient
from hypha_ray.scheduler.runtime.worker_dispatcher import WorkerDispatcher
from hypha_ray.telemetry.actor import Telemetry
from hypha_ray.types import Report, Source

WORKERS = 500
HOSTS = 4
EVERY_S = 1.0
"""Seconds between two reports of a worker."""
WARM_UP_S = 20.0
SECONDS = 60.0
NEWS_S = 0.1
"""Seconds between two looks at what is due for the driver."""


class _Host:
    """Plays many workers, which do nothing but report."""

    async def run(self, source: Source) -> AsyncIterator[Report]:
        """Report until the host is ended, at a time within the second that is the worker's own."""
        at = time.monotonic() + EVERY_S * source.worker / WORKERS
        while True:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            at += EVERY_S
            yield Report(source, 0, 4, 32, 4096, 4096, 8e3, EVERY_S, 4, 1e-3, 1e-3, 0.5)


class _Fleet:
    """Stands where a scheduler has the actors of its run."""

    def __init__(self, hosts: list[Any]) -> None:
        self._hosts = hosts

    async def hire(self, source: Source) -> tuple[Any, bool]:
        """Start a worker's stream."""
        host = self._hosts[source.worker % len(self._hosts)]
        return host.run.options(num_returns="streaming").remote(source), False

    def bridges(self, number: int) -> bool:
        """No trainer is outside of Ray."""
        return False


class _Scheduler:
    """Listens to all workers as a scheduler does, and hands on what they report."""

    def __init__(self, hosts: list[Any], directory: str) -> None:
        self._client = TelemetryClient()
        writer = partial(ray.remote(num_cpus=0, concurrency_groups={"pulse": 1})(Telemetry).remote, directory)

        async def start() -> Any:
            return writer(TelemetrySettings(sinks=["jsonl", "prometheus"]), "streams", {})

        self._client.telemetry = SupervisedActor("telemetry", start, ray.kill, 60.0, 60.0, self._client.replaced)
        self._tasks: set[asyncio.Task[None]] = set()
        fleet: Any = _Fleet(hosts)
        none: Any = None
        traces = RoundTraces(Job(), attempt=1)
        self._dispatcher = WorkerDispatcher(fleet, none, none, self._client, self._hear, self._spawn, traces)
        self._heard: dict[int, float] = {}
        self._events = 0
        self._silent_s = 0.0

    async def run(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Hire all workers, and yield what a driver is shown."""
        self._client.open()
        for worker in range(WORKERS):
            self._dispatcher.hire(Source("streams", worker, 1))
        while True:
            await asyncio.sleep(NEWS_S)
            if records := self._client.for_driver():
                yield records

    async def measure(self, seconds: float) -> dict[str, float]:
        """CPU of this process, events, and the longest silence of a worker, from now on."""
        self._events = 0
        self._silent_s = 0.0
        began = time.monotonic()
        worked = time.process_time()
        await asyncio.sleep(seconds)
        passed = time.monotonic() - began
        worked = time.process_time() - worked
        silent_s = max(self._silent_s, *(time.monotonic() - at for at in self._heard.values()))
        figures = {"events_per_s": self._events / passed, "longest_silence_s": silent_s, "heard": len(self._heard)}
        return {"cores": worked / passed, "ms_per_event": 1e3 * worked / max(1, self._events), **figures}

    def _hear(self, event: Input) -> None:
        if isinstance(event, Lost):
            raise RuntimeError(event.reason)
        assert isinstance(event, Report)
        now = time.monotonic()
        worker = event.source.worker
        self._silent_s = max(self._silent_s, now - self._heard.get(worker, now))
        self._heard[worker] = now
        self._events += 1
        figures = {"loss": 2.0, "learning_rate": event.learning_rate, "samples": event.samples, "batch_s": 0.25}
        self._client.record({"kind": "step", "worker": worker, "round": event.round, **figures})

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        return task


def streams() -> dict[str, dict[str, Any]]:
    """Cores that a scheduler's process keeps busy with the reports of many workers, and whether a lease is lost."""
    with tempfile.TemporaryDirectory() as directory, connected("bench"):
        hosts = [ray.remote(num_cpus=0, max_concurrency=WORKERS)(_Host).remote() for _ in range(HOSTS)]
        scheduler = ray.remote(num_cpus=0)(_Scheduler).remote(hosts, directory)
        shown = scheduler.run.options(num_returns="streaming").remote()
        ray.get(scheduler.measure.remote(WARM_UP_S))
        measured = ray.get(scheduler.measure.remote(SECONDS))
        assert shown is not None  # The stream ends with its last reference.
    cores = measured.pop("cores")
    lease_s = Job().worker.lease_s
    lost = measured["longest_silence_s"] > lease_s or measured["heard"] < WORKERS
    figures = {name: round(value, 3) for name, value in measured.items()}
    conditions = {"lease_s": lease_s, "lease_lost": lost, "workers": WORKERS, "seconds": SECONDS}
    return {"streams_500": {"value": cores, "target": "<= 0.6", **figures, **conditions}}
