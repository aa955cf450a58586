"""The Ray actor of a worker. Its life is one streaming call; orders reach it beside that on a control thread."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import ray

from hypha_ray.config import Job
from hypha_ray.errors import HyphaError
from hypha_ray.types import Event, Failed, Flat, Plan, Source
from hypha_ray.worker.desk import Desk
from hypha_ray.worker.feeder import Arrays, Closed, Feeder

log = logging.getLogger(__name__)


class TrainWorker:
    """Trains with torch inside the actor.

    `run` yields events; a `Delta` is followed by its payloads. Everything else only puts orders down, so it returns at
    once and may come twice or in another order.
    """

    def __init__(self, job: Job, source: Source) -> None:
        self._job, self._source = job, source
        self._feeder = Feeder(job.run.seed)
        self._desk = Desk(job.sync.fragments)
        self._out: SimpleQueue[Event | Flat | Exception | None] = SimpleQueue()

    @ray.method(num_returns="streaming")
    def run(self) -> Iterator[Event | Flat]:
        """The worker's whole life, as a stream."""
        threading.Thread(target=self._train, name="inner-loop", daemon=True).start()
        while (item := self._out.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    @ray.method(concurrency_group="control")
    def feed(self, index: int, arrays: Arrays) -> None:
        """Take a slice in."""
        self._feeder.put(index, arrays)

    @ray.method(concurrency_group="control")
    def assign(self, plan: Plan) -> None:
        """Take a plan, or a corrected one."""
        if self._desk.assign(plan):
            self._feeder.keep(plan.keep)

    @ray.method(concurrency_group="control")
    def merge(self, round_number: int, fragment: int, weights: Flat) -> None:
        """Take the global weights of a round."""
        self._desk.merge(round_number, fragment, weights)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the inner loop at its next wait."""
        self._desk.close()
        self._feeder.close()

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """The process, for tests that kill it."""
        return os.getpid()

    def _train(self) -> None:
        try:
            import torch

            torch.set_num_threads(max(1, int(self._job.resources.worker.cpu)))
            from hypha_ray.worker.loop import InnerLoop

            InnerLoop(self._job, self._source, self._feeder, self._desk, self._out.put).run()
        except Closed:
            log.info("stopped")
        except HyphaError as error:
            self._out.put(Failed(self._source, -1, error))
        except Exception as error:
            log.exception("the inner loop broke")
            self._out.put(error)
        self._out.put(None)
