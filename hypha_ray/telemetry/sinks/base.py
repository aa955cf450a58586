"""Destinations of records: protocol of a sink, several sinks as one, and isolation of training from their failures.

A sink other than the files may fail, hang or vanish. So each has its own thread and bounded queue: passing a record
takes microseconds in any case, and lost records are counted.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from hypha_ray.config import Job
from hypha_ray.errors import reason_of
from hypha_ray.plugins import create, find, is_built_in
from hypha_ray.telemetry.sinks.files import (
    EVENTS,
    METRICS,
    ROLLOUTS,
    SUMMARY,
    JsonLines,
    Record,
    read_tail,
    write_json,
)
from hypha_ray.telemetry.sinks.inputs import SinkPlace, check_installed
from hypha_ray.texts import counted, redacted

_logger = logging.getLogger(__name__)

Call: TypeAlias = Callable[[], None]
CAPACITY = 4096
"""Records that wait for a slow sink; a worker makes about one a second."""
PATIENCE_S = 5.0
"""Longest wait for all sinks together at the end of a run."""
_TAIL_BYTES = 1 << 20
"""Bytes at the end of a file of responses that are read for those of the newest rounds."""
_MOST_KEYS = 100_000
"""Largest number of responses that are remembered."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
"""Pauses between attempts to start a sink whose server isn't there; each is twice as long as the last one."""


class Sink(Protocol):
    """Destination of records and events."""

    def start(self, config: Record) -> None:
        """Open it; `config` is the job's, without secrets."""

    def record(self, record: Record) -> None:
        """Take a record of metrics."""

    def event(self, event: Record) -> None:
        """Take an event."""

    def summary(self, figures: Record) -> None:
        """Take the figures of the whole run."""

    def close(self) -> None:
        """Send queued records, and release all resources."""


class Tally:
    """Losses of a sink, by cause; the first loss is reported as a problem, later ones are only counted.

    A sink that can't be started yet is a problem, too, and that it was started in the end.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._failed = self._dropped = 0
        self._problems: list[str] = []

    def fail(self, reason: object) -> None:
        """Count a call or an export that failed."""
        self._count(f"failed ({redacted(str(reason))})", failed=1)

    def drop(self, calls: int = 1) -> None:
        """Count calls that never reached the sink."""
        self._count("is too slow", dropped=calls)

    def wait(self, reason: object, capacity: int) -> None:
        """Report that the sink can't be started yet; nothing is lost so far."""
        retries_text = f"it is tried again, and up to {capacity} records wait"
        self._report(f"telemetry sink {self.name} can't be started yet ({redacted(str(reason))}); {retries_text}")

    def began(self) -> None:
        """Report that the sink is started at last, with the number of records that it lacks."""
        missing_text = "no record is missing there"
        if self._dropped:
            verb = "is" if self._dropped == 1 else "are"
            missing_text = f"{counted(self._dropped, 'record')} {verb} missing there"
        self._report(f"telemetry sink {self.name} is started now; {missing_text}")

    def _count(self, problem: str, failed: int = 0, dropped: int = 0) -> None:
        with self._lock:
            is_first = not self._failed and not self._dropped
            self._failed += failed
            self._dropped += dropped
        if is_first and (failed or dropped):
            self._report(f"telemetry sink {self.name} {problem}; training goes on, further losses are only counted")

    def _report(self, text: str) -> None:
        self._problems.append(text)
        _logger.warning("%s", text)

    def next_problem(self) -> str | None:
        """Return the next line for the user, each once; None if there is none."""
        return self._problems.pop(0) if self._problems else None

    def counts(self) -> dict[str, int]:
        """Return the losses so far."""
        with self._lock:
            return {"failed": self._failed, "dropped": self._dropped}


class Files:
    """The sink of every run, without a queue: the .jsonl files and summary.json of the run directory."""

    def __init__(self, directory: Path) -> None:
        self.tally = Tally("files")
        self._directory = directory
        self._metrics = JsonLines(directory / METRICS)
        self._events = JsonLines(directory / EVENTS)
        self._rollouts: _Responses | None = None
        """File of responses; None before the first one, which most runs never have."""

    def start(self, config: Record) -> None:
        """Nothing to do: the run directory has the job's configuration already."""

    def record(self, record: Record) -> None:
        """Append to metrics.jsonl."""
        self._write(lambda: self._metrics.write(record))

    def event(self, event: Record) -> None:
        """Append to events.jsonl, or to rollouts.jsonl if it is a response."""
        self._write(lambda: self._file_of(event).write(event))

    def summary(self, figures: Record) -> None:
        """Write summary.json."""
        self._write(lambda: write_json(self._directory / SUMMARY, figures))

    def close(self) -> None:
        """Close all files."""
        self._metrics.close()
        self._events.close()
        if self._rollouts is not None:
            self._rollouts.close()

    def _file_of(self, event: Record) -> JsonLines | _Responses:
        if event["kind"] != "rollout":
            return self._events
        if self._rollouts is None:
            self._rollouts = _Responses(self._directory / ROLLOUTS)
        return self._rollouts

    def _write(self, call: Call) -> None:
        try:
            call()
        except OSError as error:  # a full disk stops checkpoints, and they say so; telemetry stops nothing
            self.tally.fail(error)


class _Responses:
    """File that has each response once.

    The successor of a lost worker or of a killed run responds to the same prompts of a round in the same way.
    """

    def __init__(self, path: Path) -> None:
        earlier = read_tail(path, _TAIL_BYTES) if path.is_file() else []
        self._written = set(map(_key_of, earlier))
        """Keys of the newest responses."""
        self._file = JsonLines(path)

    def write(self, response: Record) -> None:
        """Append a response that isn't there yet.

        Raises:
            OSError: the disk is full or gone.

        """
        key = _key_of(response)
        if key in self._written:
            return
        self._file.write(response)
        if len(self._written) >= _MOST_KEYS:
            self._written.clear()
        self._written.add(key)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _key_of(response: Record) -> tuple[Any, ...]:
    return tuple(response.get(name) for name in ("round", "epoch", "slice", "sample", "number"))


class Isolated:
    """A sink in a thread of its own, behind a bounded queue; none of its methods blocks or raises.

    A sink that can't be started is tried again until the run ends. Its records wait in the queue. It gets copies, so it
    may change them.
    """

    def __init__(self, sink: Sink, tally: Tally, capacity: int = CAPACITY) -> None:
        self.tally = tally
        self._sink = sink
        self._queue: queue.Queue[Call | None] = queue.Queue(capacity)
        self._closing = threading.Event()
        self._config: Record = {}
        self._thread = threading.Thread(target=self._work, name=f"telemetry-{tally.name}", daemon=True)

    def start(self, config: Record) -> None:
        """Start the thread and, in it, the sink."""
        self._config = config
        self._thread.start()

    def record(self, record: Record) -> None:
        """Queue a record, or count it as dropped."""
        self._put(lambda: self._sink.record(deepcopy(record)))

    def event(self, event: Record) -> None:
        """Queue an event, or count it as dropped."""
        self._put(lambda: self._sink.event(deepcopy(event)))

    def summary(self, figures: Record) -> None:
        """Queue the run's figures."""
        self._put(lambda: self._sink.summary(deepcopy(figures)))

    def close(self) -> None:
        """Make the thread end when the queue is empty; `join` waits for it."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # Wakes a thread that waits for a call.

    def join(self, patience_s: float) -> None:
        """Wait for the thread; after that time abandon it, and count its queued calls as lost."""
        self._thread.join(max(0.0, patience_s))
        if self._thread.is_alive():
            self.tally.fail("not done in time at the end of the run")
            self._drop_queued()

    def _drop_queued(self) -> None:
        calls = [call for call in list(self._queue.queue) if call is not None]
        self.tally.drop(len(calls))

    def _put(self, call: Call) -> None:
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            self.tally.drop()

    def _work(self) -> None:
        if not self._open():
            self._drop_queued()
            return
        while not (self._closing.is_set() and self._queue.empty()):
            call = self._queue.get()
            if call is not None:
                self._call_sink(call)
        self._call_sink(self._sink.close)

    def _open(self) -> bool:
        """Start the sink; return whether it was started before the run ended."""
        pause_s = _FIRST_PAUSE_S
        has_failed = False
        while True:
            is_last_attempt = self._closing.is_set()
            try:
                self._sink.start(deepcopy(self._config))
            except (Exception, SystemExit) as error:  # A sink of users may raise anything.
                reason = reason_of(error)
            else:
                if has_failed:
                    self.tally.began()
                return True
            if is_last_attempt:
                self.tally.fail(reason)
                return False
            if not has_failed:
                self.tally.wait(reason, self._queue.maxsize)
            has_failed = True
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _call_sink(self, call: Call) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # A sink of users may raise anything.
            self.tally.fail(reason_of(error))


class MadeLate:
    """Sink of users that is made at its start, since its constructor may fail or wait, too.

    Args:
        make: function that makes the sink.

    """

    def __init__(self, make: Callable[[], Sink]) -> None:
        self._make = make
        self._sink: Sink | None = None

    def start(self, config: Record) -> None:
        """Make the sink, and open it."""
        sink = self._make()
        sink.start(config)
        self._sink = sink

    def __getattr__(self, method: str) -> Any:
        return getattr(self._sink, method)


class Composite:
    """Several sinks as one: the files first, then the isolated ones."""

    def __init__(self, files: Files, isolated: Sequence[Isolated] = (), patience_s: float = PATIENCE_S) -> None:
        self._sinks: list[Files | Isolated] = [files, *isolated]
        self._isolated = list(isolated)
        self._patience_s = patience_s

    def add(self, isolated: Iterable[Isolated]) -> None:
        """Add further sinks, before the start."""
        further_sinks = list(isolated)
        self._sinks += further_sinks
        self._isolated += further_sinks

    def start(self, config: Record) -> None:
        """Start every sink."""
        for sink in self._sinks:
            sink.start(config)

    def record(self, record: Record) -> None:
        """Give a record to every sink."""
        for sink in self._sinks:
            sink.record(record)

    def event(self, event: Record) -> None:
        """Give an event to every sink."""
        for sink in self._sinks:
            sink.event(event)

    def summary(self, figures: Record) -> None:
        """Give the run's figures to every sink."""
        for sink in self._sinks:
            sink.summary(figures)

    def close(self) -> None:
        """Close all sinks at once and wait for them, no longer than `patience_s` in all."""
        deadline = time.monotonic() + self._patience_s
        for sink in self._sinks:
            sink.close()
        for sink in self._isolated:
            sink.join(deadline - time.monotonic())

    def problems(self) -> list[str]:
        """Return problems of sinks since the last call."""
        problems = [sink.tally.next_problem() for sink in self._sinks]
        return [text for text in problems if text is not None]

    def losses(self) -> dict[str, dict[str, int]]:
        """Return the losses of each sink, by its name."""
        return {sink.tally.name: sink.tally.counts() for sink in self._sinks}


def build(
    directory: Path,
    run: str,
    names: Sequence[str],
    aim_repository: str | None = None,
    status_bridge: str | None = None,
    patience_s: float = PATIENCE_S,
    trackers: str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Composite:
    """Make the sinks of a job; ``jsonl`` is always among them, ``console`` is the driver's.

    Args:
        directory: the run directory.
        run: name of the run.
        names: names of the sinks.
        aim_repository: folder of Aim's repository; None: that of the trackers.
        status_bridge: address of a connector that metrics are posted to.
        patience_s: longest wait for all sinks at the end of the run.
        trackers: folder in which trackers keep all runs; None: the run directory.
        options: options of users' own sinks, by name.

    Raises:
        AuthenticationError: the Aim repository is not local.
        ConfigError: a sink can't be had.

    """
    isolated: list[Isolated] = []
    options = options or {}
    trackers_folder = None if trackers is None else Path(trackers)
    for name in dict.fromkeys(names):
        if name in ("console", "jsonl"):
            continue
        tally = Tally(name)
        sink_place = SinkPlace(run, directory, tally, trackers_folder, aim_repository)
        make: Callable[[], Sink] = partial(create, "sinks", name, options.get(name), sink_place)
        sink: Any = make() if is_built_in("sinks", name) else MadeLate(make)
        isolated.append(Isolated(sink, tally))
    if status_bridge is not None:
        from hypha_ray.telemetry.sinks.status import StatusBridge

        isolated.append(Isolated(StatusBridge(status_bridge), Tally("status_bridge")))
    return Composite(Files(directory), isolated, patience_s)


def check_built_in(job: Job) -> None:
    """Refuse built-in sinks whose packages aren't installed, or whose settings are wrong.

    Ray isn't loaded for that: Prometheus' package is Ray.

    Raises:
        HyphaError: a sink's package is missing, or a setting of it is wrong.

    """
    for name in job.telemetry.sinks:
        if name in ("console", "jsonl", "prometheus") or not is_built_in("sinks", name):
            continue
        sink_class = find("sinks", name)
        check_installed(name, getattr(sink_class, "packages", ()))
        if hasattr(sink_class, "check"):
            sink_class.check(job)


def try_sink(name: str, options: Mapping[str, Any] | None) -> None:
    """Make a sink for an imaginary run, without starting it."""
    with tempfile.TemporaryDirectory() as folder:
        sink_place = SinkPlace("trial", Path(folder), Tally(name))
        create("sinks", name, options, sink_place)
