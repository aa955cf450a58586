"""Work under one scheduler: orders and slices in, a stream of events out, and the inner loop on a thread between.

The inner loop waits here for the control thread, which may interrupt its waits.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.codec import downward_codec
from hypha_ray.config import Job
from hypha_ray.errors import ConfigError, HyphaError, place_of, reason_of
from hypha_ray.failpoints import failpoint
from hypha_ray.types import (
    Alive,
    Arrays,
    Event,
    Failed,
    Flat,
    FragmentUpdate,
    Layout,
    Leaving,
    Plan,
    Samples,
    Source,
    Span,
    WeightsVersion,
    joined,
    window,
)
from hypha_ray.types.events import HandOver, current_work

log = logging.getLogger(__name__)
Item: TypeAlias = Event | Flat
"""Items of the stream."""
NOT_REPRODUCIBLE = " does not have a deterministic implementation"
"""Words of torch's error after the name of an operation."""
PULSES = 4
"""Number of signs of life in the time of a lease, from a worker without other events."""
Emit: TypeAlias = Callable[[Event | HandOver], None]
"""Function that takes events and results of an inner loop; it must not block."""


class Closed(Exception):
    """The worker is being stopped; its results are dropped."""


class Retired(Closed):
    """The worker is leaving; its result of this round is still wanted."""


class ProcessLostError(Exception):
    """Another process of the worker has died or is silent; the worker is lost with it."""


class Interruptible:
    """State that one thread writes and another one waits for, until it is interrupted."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._interruption: type[Closed] | None = None

    def close(self, why: type[Closed] = Closed) -> None:
        """Interrupt this wait of the reader and all later ones with `why`; the first call decides."""
        with self._changed:
            self._interruption = self._interruption or why
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `Closed` or `Retired` if the reader has been interrupted."""
        if self._interruption is not None:
            raise self._interruption

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait, with the lock held, for something to be ready, or for an interruption."""
        self._changed.wait_for(lambda: self._interruption is not None or is_ready())
        self.check()


class DifferenceDecoder:
    """Decoder of global weights that are sent as differences to the previous ones."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        self._codec = downward_codec(name, options)
        self._theta: dict[int, Flat] = {}
        self._spare: dict[int, Flat] = {}
        """Arrays of the round before the last, which are written again; those of the last one may still be read."""

    def decode(self, piece: FragmentUpdate, weights: Flat) -> Flat:
        """Weights of a fragment: those received, or the previous ones with the received difference."""
        fragment = piece.fragment
        if self._codec is None:
            return weights
        if not piece.difference:
            self._theta[fragment] = weights
            self._spare.pop(fragment, None)
            return weights
        from hypha_ray.codec.feedback import advance

        previous = self._theta[fragment]
        theta = advance(self._codec, previous, weights, self._spare.get(fragment))
        self._theta[fragment] = theta
        if all(array.flags.writeable for array in previous.values()):  # Arrays of the object store are read-only.
            self._spare[fragment] = previous
        return theta


def epoch_order(seed: int, epoch: int, slice_index: int, samples: int) -> npt.NDArray[np.int64]:
    """Random order of a slice's samples in an epoch: the same on every machine."""
    rng = np.random.default_rng([seed, epoch, slice_index])
    return rng.permutation(samples)


class BatchSource(Interruptible):
    """Holds slices, and returns batches of spans. One thread adds slices, another one takes batches.

    Arrays may be read-only views of the object store; batches are always fresh copies.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._slices: dict[int, Arrays] = {}
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def put(self, index: int, arrays: Arrays) -> None:
        """Add a slice. Idempotent."""
        with self._changed:
            self._slices.setdefault(index, arrays)
            self._changed.notify_all()

    def keep(self, indices: Collection[int]) -> None:
        """Drop every slice but these."""
        with self._changed:
            self._slices = {index: arrays for index, arrays in self._slices.items() if index in indices}
            self._orders = {key: rows for key, rows in self._orders.items() if key[1] in indices}

    def batch(self, spans: Sequence[Span], start: int, batch_samples: int, shuffled: bool = True) -> Samples:
        """Samples ``start … start + batch_samples - 1`` of the spans taken together; waits for slices on their way.

        Shuffled spans have the order of their epoch, others that of the file.
        """
        parts = [self._read_span(span, shuffled) for span in window(spans, start, start + batch_samples)]
        return joined(parts)

    def upcoming(self, spans: Sequence[Span], start: int, batch_samples: int, waits: bool) -> Iterator[Samples]:
        """Yield batches from ``start`` on; without waiting, up to the first one whose slices haven't arrived."""
        samples = sum(span.samples for span in spans)
        for first_sample in range(start, samples, batch_samples):
            batch_spans = window(spans, first_sample, min(first_sample + batch_samples, samples))
            with self._changed:
                if not waits and not all(span.slice in self._slices for span in batch_spans):
                    return
                parts = [self._read_span(span, shuffled=True) for span in batch_spans]
            yield joined(parts)

    def _read_span(self, span: Span, shuffled: bool) -> Samples:
        arrays = self._slice(span.slice)
        if not shuffled:
            copies = {name: np.array(array[span.start : span.stop]) for name, array in arrays.items()}
            return Samples(copies, _keys(span, np.arange(span.start, span.stop)))
        key = (span.epoch, span.slice)
        if key not in self._orders:
            self._forget_orders(span)
            first_array = next(iter(arrays.values()))
            self._orders[key] = epoch_order(self._seed, span.epoch, span.slice, len(first_array))
        rows = self._orders[key][span.start : span.stop]
        return Samples({name: array[rows] for name, array in arrays.items()}, _keys(span, rows))

    def _forget_orders(self, span: Span) -> None:
        """Drop a slice's orders of earlier epochs, which would otherwise accumulate."""
        for epoch, slice_index in list(self._orders):
            if slice_index == span.slice and epoch < span.epoch - 1:
                del self._orders[epoch, slice_index]

    def _slice(self, index: int) -> Arrays:
        with self._changed:
            self._wait(lambda: index in self._slices)
            return self._slices[index]


def _keys(span: Span, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the keys of these rows of a span's slice."""
    keys = np.empty((len(rows), 3), np.int64)
    keys[:, 0] = span.epoch
    keys[:, 1] = span.slice
    keys[:, 2] = rows
    return keys


class NewWeights(NamedTuple):
    """New global weights that the inner loop takes."""

    version: WeightsVersion
    whole: bool
    """Whether they are all fragments; otherwise the changed ones."""
    fragments: dict[int, Flat]
    """Weights by fragment."""


class Inbox(Interruptible):
    """Orders for the inner loop, written by the control thread. Each may arrive twice, and in any order."""

    def __init__(self, downward: str = "fp32", options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._decoder = DifferenceDecoder(downward, options)
        self._plan: Plan | None = None
        self._fragments: dict[WeightsVersion, dict[int, tuple[FragmentUpdate, Flat]]] = {}
        self._state: Flat | None = None
        self._layout: Layout | None = None
        self._restored = False
        self.version: WeightsVersion | None = None
        """Version of the weights that the inner loop took last; None before the first."""

    def assign(self, plan: Plan) -> bool:
        """Store a plan, unless a newer one is there; returns whether it is the newest."""
        with self._changed:
            if self._plan is not None and _plan_key(plan) <= _plan_key(self._plan):
                return False
            self._plan = plan
            self._changed.notify_all()
            return True

    def merge(self, piece: FragmentUpdate, weights: Flat) -> None:
        """Store a fragment of new weights, unless the inner loop has them."""
        with self._changed:
            if self.lacks(piece.version):
                self._fragments.setdefault(piece.version, {})[piece.fragment] = piece, weights
                self._changed.notify_all()

    def lacks(self, version: WeightsVersion) -> bool:
        """Whether the inner loop has taken only older weights, or none."""
        return self.version is None or self.version < version

    def restore(self, state: Flat) -> None:
        """Store the inner state with which the worker's predecessor ended."""
        with self._changed:
            if not self._restored:
                self._state = state
                self._changed.notify_all()

    def describe(self, layout: Layout) -> None:
        """Store the layout, for a reader that doesn't build the model."""
        with self._changed:
            self._layout = layout
            self._changed.notify_all()

    def layout(self) -> Layout:
        """Layout of the tensors; waits for it."""
        with self._changed:
            self._wait(lambda: self._layout is not None)
            assert self._layout is not None
            return self._layout

    def plan(self, round_number: int) -> Plan:
        """The newest plan, which is for this round or a later one; waits for it."""
        with self._changed:
            self._wait(lambda: self._plan is not None and self._plan.round >= round_number)
            assert self._plan is not None
            return self._plan

    def correction(self, idle_plan: Plan) -> Plan | None:
        """Wait for a newer version of an idle plan; None once the plan of a later round is there."""
        with self._changed:
            self._wait(lambda: self._plan is not None and _plan_key(self._plan) > _plan_key(idle_plan))
            assert self._plan is not None
            if self._plan.round != idle_plan.round:
                return None
            return self._plan

    def weights(self, latest_version: WeightsVersion | None = None) -> NewWeights:
        """Wait for the weights to take next, until all of their fragments are there.

        They are the changes to the previous weights, unless the worker lacks those, or newer whole weights are there.
        They are no newer than `latest_version`, unless there are only newer ones.
        """
        with self._changed:
            self._wait(lambda: self._next_version(latest_version) is not None)
            version = self.version = self._next_version(latest_version)
            assert version is not None
            fragments = self._fragments[version]
            self._fragments = {
                later_version: parts for later_version, parts in self._fragments.items() if later_version > version
            }
        is_whole = True
        theta: dict[int, Flat] = {}
        for fragment, (piece, flat) in fragments.items():
            theta[fragment] = self._decoder.decode(piece, flat)
            is_whole = is_whole and piece.whole
        return NewWeights(version, is_whole, theta)

    def state(self) -> Flat | None:
        """Wait for the predecessor's inner state; it is returned once, then None."""
        with self._changed:
            self._wait(lambda: self._restored or self._state is not None)
            state = self._state
            self._state = None
            self._restored = True
            return state

    def _next_version(self, latest_version: WeightsVersion | None) -> WeightsVersion | None:
        """Version of the weights to take next; None while they aren't there."""
        following_version = None if self.version is None else self.version + 1
        has_following = False
        whole_versions: list[WeightsVersion] = []
        for version, fragments in self._fragments.items():
            piece, _ = next(iter(fragments.values()))
            if len(fragments) < piece.of:
                continue
            if version == following_version:
                has_following = True
            if piece.whole:
                whole_versions.append(version)
        early_versions = [version for version in whole_versions if latest_version is None or version <= latest_version]
        if has_following and not early_versions:
            assert following_version is not None
            return WeightsVersion(following_version)
        return max(early_versions or whole_versions, default=None)


def _plan_key(plan: Plan) -> tuple[int, int]:
    """Sort key of plans, the newest one last."""
    return plan.round, plan.version


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

    def _interrupt(self, error_class: type[Closed]) -> None:
        self.inbox.close(error_class)
        self.batch_source.close(error_class)

    def _next(self) -> Event | HandOver | None:
        """Next event or result; raises the error that broke the inner loop."""
        try:
            item = self._out.get(timeout=self._job.lease_s / PULSES)
        except Empty:
            present_work = current_work()
            return Alive(self.source, present_work.text, present_work.limited, platform.node())
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
        except (Exception, SystemExit) as error:  # A member of users may raise anything.
            log.exception("the inner loop broke")
            self._out.put(self._end_of(error))
        self._out.put(None)

    def _end_of(self, error: BaseException) -> Event | Exception:
        """Last item of the stream after an error: one that isn't the job's fault is raised in the worker."""
        config_error = _as_config_error(error)
        if config_error is not None:
            return Failed(self.source, config_error)
        if not isinstance(error, Exception):  # The thread would end by it, and the stream never.
            return RuntimeError(f"{reason_of(error)} {place_of(error)}")
        error.add_note(place_of(error))
        return error


def _as_config_error(error: BaseException) -> ConfigError | None:
    """Error of a job in replay mode whose model needs an operation that isn't reproducible; None for other errors."""
    text = str(error)
    if NOT_REPRODUCIBLE not in text:
        return None
    text_before = text.partition(NOT_REPRODUCIBLE)[0]
    line = text_before.rpartition("\n")[2]
    operation = line.rpartition(": ")[2].strip()
    problem = f"run.mode = \"replay\" can't be kept on this device: {operation} isn't reproducible there"
    return ConfigError("TRN005", problem, fix='train on CPUs, choose another model, or leave run.mode at "elastic"')
