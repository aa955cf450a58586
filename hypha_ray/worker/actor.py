"""The Ray actor of a worker. Its life is one streaming call; orders reach it beside that on a control thread."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import TypeAlias

import ray

from hypha_ray.config import Job
from hypha_ray.errors import HyphaError
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.types import Alive, Delta, Event, Failed, Flat, Leaving, Plan, Source
from hypha_ray.worker.desk import Desk
from hypha_ray.worker.feeder import Arrays, Feeder
from hypha_ray.worker.waits import Closed, Retired

log = logging.getLogger(__name__)

Item: TypeAlias = Event | Flat
"""What the stream consists of."""

PULSE_S = (0.05, 1.0)
"""Shortest and longest silence of the stream; between them it is that of reports."""


class TrainWorker:
    """Trains with torch inside the actor.

    `run` yields events; a `Delta` is followed by its payloads. Everything else only puts orders down, so it returns at
    once and may come twice or in another order. SIGTERM, by which machines announce that they go away, is an order to
    leave.
    """

    def __init__(self, job: Job, source: Source) -> None:
        arm(job.testing.failpoints, job.testing.failpoint_log)
        self._job, self._source = job, source
        self._feeder = Feeder(job.run.seed)
        self._desk = Desk(job.sync.fragments)
        self._out: SimpleQueue[Item | tuple[Item, ...] | Exception | None] = SimpleQueue()
        self._parcel: tuple[Item, ...] = ()
        """A delta whose parts aren't all there."""
        self._leaving = threading.Lock()
        """Taken for good by the first order to leave."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.leave("SIGTERM"))

    @ray.method(num_returns="streaming")
    def run(self) -> Iterator[Item]:
        """The worker's whole life, as a stream that is never silent for long."""
        threading.Thread(target=self._train, name="inner-loop", daemon=True).start()
        while (item := self._next()) is not None:
            if isinstance(item, tuple):
                yield from self._deliver(item)
            else:
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
    def restore(self, state: Flat) -> None:
        """Take the inner state over with which the predecessor ended the last committed round."""
        self._desk.restore(state)

    @ray.method(concurrency_group="control")
    def leave(self, reason: str) -> None:
        """End the inner loop after its batch; what is done is handed over, then the stream ends with `Left`.

        Safe in a signal handler: nothing here waits for the thread that is interrupted.
        """
        if self._leaving.acquire(blocking=False):
            self._out.put(Leaving(self._source, self._desk.round, reason))
            self._end(Retired)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the inner loop after its batch, and the stream with it; nothing is handed over."""
        self._end(Closed)

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """The process, for tests that kill it."""
        return os.getpid()

    def _end(self, why: type[Closed]) -> None:
        self._desk.close(why)
        self._feeder.close(why)

    def _next(self) -> Item | tuple[Item, ...] | None:
        """What is to be said next; raises what broke the inner loop."""
        shortest_s, longest_s = PULSE_S
        try:
            item = self._out.get(timeout=max(shortest_s, min(longest_s, self._job.worker.report_every_s)))
        except Empty:
            return Alive(self._source, -1)
        if isinstance(item, Exception):
            raise item
        return item

    def _emit(self, item: Item) -> None:
        """Put down what the inner loop says: a delta and its parts as one, so that nobody's word comes in between."""
        match item:
            case Delta():
                self._parcel = (item,)
            case dict():
                self._parcel += (item,)
            case _:
                self._out.put(item)
        delta = self._parcel[0] if self._parcel else None
        if isinstance(delta, Delta) and len(self._parcel) == 1 + delta.fragments + delta.inner_state:
            self._out.put(self._parcel)
            self._parcel = ()

    def _deliver(self, parcel: tuple[Item, ...]) -> Iterator[Item]:
        """A delta, its parts, and one word more: what was taken from the stream before that word is whole."""
        delta, *parts = parcel
        yield delta
        failpoint("worker.mid_delta", self._source.worker)
        yield from (part for part in parts)  # A generator: Ray sends into it, which a list's iterator doesn't take.
        failpoint("worker.after_delta", self._source.worker)
        yield Alive(self._source, -1)

    def _train(self) -> None:
        try:
            failpoint("worker.start", self._source.worker)
            import torch

            torch.set_num_threads(max(1, int(self._job.resources.worker.cpu)))
            from hypha_ray.worker.loop import InnerLoop

            InnerLoop(self._job, self._source, self._feeder, self._desk, self._emit).run()
        except Closed:
            log.info("stopped")
        except HyphaError as error:
            self._out.put(Failed(self._source, -1, error))
        except Exception as error:
            log.exception("the inner loop broke")
            self._out.put(error)
        self._out.put(None)
