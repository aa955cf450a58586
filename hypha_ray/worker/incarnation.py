"""Work under one scheduler: orders in, a stream of events out, and the inner loop on a thread between."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from hypha_ray.config import Job
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.failpoints import failpoint
from hypha_ray.types import Alive, Delta, Event, Failed, Flat, Leaving, Source
from hypha_ray.types.current_work import current_work
from hypha_ray.worker.inbox import BatchSource, Closed, Inbox, Retired

log = logging.getLogger(__name__)

Item: TypeAlias = Event | Flat
"""Items of the stream."""
NOT_REPRODUCIBLE = " does not have a deterministic implementation"
"""Words of torch's error after the name of an operation."""
PULSES = 4
"""Number of signs of life in the time of a lease, from a worker without other events."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Result of a round."""

    delta: Delta
    parts: Sequence[Flat]
    """Payloads of the delta, and the inner state if the delta has one."""


Emit: TypeAlias = Callable[[Event | HandOver], None]
"""Function that takes events and results of an inner loop; it must not block."""


class Loop(Protocol):
    """Loop that trains."""

    def run(self) -> None:
        """Train until the final plan, or until the worker has left; raises `Closed` when it is stopped before."""


MakeLoop: TypeAlias = Callable[[Job, Source, BatchSource, Inbox, Emit], Loop]


class Incarnation:
    """One incarnation of a worker, with all of its state; its inner loop begins after its predecessor's has ended."""

    def __init__(self, job: Job, source: Source, loop: MakeLoop, predecessor: Incarnation | None = None) -> None:
        self._job = job
        self.source = source
        self._loop = loop
        self.batch_source = BatchSource(job.run.seed)
        self.inbox = Inbox(job.sync.downward_codec, job.sync.downward_codec_options)
        self._out: SimpleQueue[Event | HandOver | Exception | None] = SimpleQueue()
        """Events, results and the error of the inner loop; None at its end."""
        self._earlier_thread = predecessor.last_thread if predecessor is not None else None
        self._thread = threading.Thread(target=self._train, name="inner-loop", daemon=True)

    @property
    def last_thread(self) -> threading.Thread | None:
        """Thread of the latest inner loop that was started, in this incarnation or an earlier one."""
        has_started = self._thread.ident is not None
        return self._thread if has_started else self._earlier_thread

    def run(self) -> Iterator[Item]:
        """Start the inner loop, and stream its events until its end, with signs of life in between."""
        self._thread.start()
        while (item := self._next()) is not None:
            if isinstance(item, HandOver):
                yield from self._deliver(item)
            else:
                yield item

    def leave(self, reason: str) -> None:
        """End the inner loop after its batch. It hands over its partial result, then the stream ends with `Left`.

        Safe in a signal handler: nothing here waits for the thread that is interrupted.
        """
        self._out.put(Leaving(self.source, reason))
        self._interrupt(Retired)

    def stop(self) -> None:
        """End the inner loop after its batch, and the stream with it; nothing is handed over."""
        self._interrupt(Closed)

    def abandon(self) -> None:
        """Stop; the stream has no reader any more, so it ends at once."""
        self._interrupt(Closed)
        self._out.put(None)

    def _interrupt(self, why: type[Closed]) -> None:
        self.inbox.close(why)
        self.batch_source.close(why)

    def _next(self) -> Event | HandOver | None:
        """Next event or result; raises the error that broke the inner loop."""
        try:
            item = self._out.get(timeout=self._job.lease_s / PULSES)
        except Empty:
            work = current_work()
            return Alive(self.source, work.text, work.limited, platform.node())
        if isinstance(item, Exception):
            raise item
        return item

    def _deliver(self, result: HandOver) -> Iterator[Item]:
        """Yield a delta, its parts, and a last item that confirms them as complete."""
        yield result.delta
        failpoint("worker.mid_delta", self.source.worker)
        yield from (part for part in result.parts)  # Ray sends into the iterator, which only a generator takes.
        failpoint("worker.after_delta", self.source.worker)
        yield Alive(self.source)

    def _train(self) -> None:
        try:
            failpoint("worker.start", self.source.worker)
            if self._earlier_thread is not None:
                self._earlier_thread.join()
            self._loop(self._job, self.source, self.batch_source, self.inbox, self._out.put).run()
        except Closed:
            log.info("stopped")
        except HyphaError as error:
            self._out.put(Failed(self.source, error))
        except Exception as error:
            log.exception("the inner loop broke")
            config_error = _as_config_error(error)
            if config_error is not None:
                self._out.put(Failed(self.source, config_error))
            else:
                self._out.put(error)
        self._out.put(None)


def _as_config_error(error: Exception) -> ConfigError | None:
    """Error of a job in replay mode whose model needs an operation that isn't reproducible; None for other errors."""
    text = str(error)
    if NOT_REPRODUCIBLE not in text:
        return None
    text_before = text.partition(NOT_REPRODUCIBLE)[0]
    line = text_before.rpartition("\n")[2]
    operation = line.rpartition(": ")[2].strip()
    problem = f"run.mode = \"replay\" can't be kept on this device: {operation} isn't reproducible there"
    return ConfigError("TRN005", problem, fix='train on CPUs, choose another model, or leave run.mode at "elastic"')
