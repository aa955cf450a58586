"""Client of the telemetry actor, which passes records and events on without making the scheduler wait.

It also traces the rounds: the spans of all other processes belong to the scheduler's.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from hypha_ray.config import Job
from hypha_ray.config.training import Alert
from hypha_ray.errors import HyphaError
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler.messages import Assign, Command, Input, Persist, Reduce, Reduced
from hypha_ray.scheduler.runtime.supervised_actor import SupervisedActor
from hypha_ray.store.commits import reduction_of
from hypha_ray.telemetry.alerts import CLOCK_S, AlertBook, Notice
from hypha_ray.telemetry.news import News
from hypha_ray.telemetry.sinks.files import Record, stamped
from hypha_ray.traces import RoundKey, now_ns, start_round, traced
from hypha_ray.types import Commit, Delta, Evaluated, Merged, WeightsVersion

if TYPE_CHECKING:
    from opentelemetry.trace import Span


BACKLOG = 1000
"""Most records and events that wait while the telemetry actor is replaced; more are dropped."""
BATCH_S = 0.5
BATCH = 100
"""Longest wait of step records, and the number that is sent at once: a call costs 0.7 ms of CPU."""
FINISH_S = 10.0
"""Longest wait for telemetry at the end of a run."""
OPEN_ROUNDS = 10
"""Rounds of each worker for which the span of a round stays open: without a barrier, deltas may be as late."""


class TelemetryClient:
    """Sends records and events in order and in batches, to telemetry and to the driver; counts what it drops.

    Step records, one a second from each worker, wait for others. Everything else goes at once, together with what
    waits. So a scheduler that dies leaves no gap in the records that its successor goes on from.

    Args:
        workers: number of workers that the job wants; None: unknown.
        alerts: alerts of the job, which are told as events.
        is_async: whether a commit may have deltas of several local rounds of a worker.

    """

    def __init__(self, workers: int | None = None, alerts: Sequence[Alert] = (), is_async: bool = False) -> None:
        self._responses = _UncommittedResponses(is_async)
        self.telemetry: SupervisedActor | None = None
        """Telemetry actor; None until it is started."""
        self._records: list[Record] = []
        self._events: list[Record] = []
        self._due = asyncio.Event()
        """Set when waiting records and events are to be sent."""
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[None] | None = None
        """Task that sends; None until telemetry may open its files."""
        self._closing = False
        self._dropped = 0
        self._alerts = AlertBook(alerts, time.monotonic())
        self._clock: asyncio.Task[None] | None = None
        """Task that looks at the clock for alerts; None without alerts."""
        self._news = News(workers)
        self._shown: list[dict[str, Any]] = []
        """Records that the driver hasn't received yet."""
        self._show_at = math.inf
        """Monotonic time at which the driver is due to get them; infinity without any."""

    def open(self) -> None:
        """Let telemetry open its files, and begin to send."""
        if self._sender is None:
            loop = asyncio.get_running_loop()
            self._sender = loop.create_task(self._send())
            if self._alerts:
                self._clock = loop.create_task(self._look_at_the_clock())

    def recall(self, directory: Path) -> None:
        """Go on with the alerts of earlier attempts, by the files of the run directory."""
        if self._alerts:
            self._alerts.recall(directory, time.monotonic())

    def record(self, fields: Record) -> None:
        """Send a record to metrics.jsonl and the sinks, with the time of day, and to the driver."""
        self._put(self._records, stamped(fields))
        self._shown.append(dict(fields))
        waits_s = BATCH_S if fields["kind"] == "step" else 0.0
        self._show_at = min(self._show_at, time.monotonic() + waits_s)
        if not waits_s or len(self._records) >= BATCH:
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self._due.set)
        if self._alerts:
            self._tell(self._alerts.add_record(fields, time.monotonic()))

    def event(self, fields: Record) -> None:
        """Send an event to events.jsonl, with the time of day; the driver gets a line of text if it is news."""
        if fields["kind"] == "rollout":
            self._responses.hold(stamped(fields))
            return
        self._news.add_event(fields)
        self._put(self._events, stamped(fields))
        self._due.set()
        if self._alerts and fields["kind"] not in ("alert", "alert_over"):
            self._tell(self._alerts.add_event(fields, time.monotonic()))

    def committed(self, commit: Commit) -> None:
        """Send the event of a commit that is on the disk, and the responses that its deltas were trained on."""
        fields = {"round": commit.round, "theta_sha256": commit.theta_sha256, "epoch": commit.epoch}
        self.note("commit", **fields, deltas=len(commit.deltas))
        for response in self._responses.of(commit):
            self._put(self._events, response)

    def note(self, kind: str, **fields: Any) -> None:
        """Send an event of this moment."""
        self.event({"kind": kind, "monotonic_s": time.monotonic(), **fields})

    def for_driver(self, everything: bool = False) -> list[dict[str, Any]]:
        """Return records and lines of text that are due at the driver; with `everything`, all of them.

        Step records are due `BATCH_S` seconds after the first of them.
        """
        now = time.monotonic()
        news = [{"kind": "news", "text": text} for text in self._news.lines(now, everything)]
        if not news and not everything and now < self._show_at:
            return []
        shown = self._shown
        self._shown = []
        self._show_at = math.inf
        return [*shown, *news]

    def replaced(self, name: str, reason: str) -> None:
        """Send the event that an actor was replaced."""
        self.note("revive", role=name, reason=reason)

    def problem(self, text: str) -> None:
        """Send the event that something went wrong which doesn't end the run."""
        self.note("problem", text=text)

    async def finish(self, closing_fields: Record) -> dict[str, Any]:
        """Send what waits, close files and sinks, and return the summary, which a failed run has too."""
        if self.telemetry is None:
            return {}
        self.open()
        self._closing = True
        self._due.set()
        if self._clock is not None:
            self._clock.cancel()
        try:
            if self._sender is not None:
                await asyncio.wait({self._sender}, timeout=FINISH_S)
            figures = {**closing_fields, "dropped": self._dropped}
            call = self.telemetry.ask(lambda telemetry: telemetry.finish.remote(figures))
            summary = await asyncio.wait_for(call, FINISH_S)
            return dict(await summary)
        except (TimeoutError, RayError, HyphaError):
            return {}

    def _tell(self, notices: Iterable[Notice]) -> None:
        """Send the events of alerts."""
        for notice in notices:
            self.note(
                "alert_over" if notice.is_over else "alert",
                alert=notice.alert.title,
                metric=notice.alert.metric,
                op=notice.alert.op,
                value=notice.value,
                limit=notice.limit,
                round=notice.round,
                worker=notice.worker,
                text=notice.text,
            )

    async def _look_at_the_clock(self) -> None:
        """Tell alerts that no record or event makes due."""
        while True:
            await asyncio.sleep(CLOCK_S)
            self._tell(self._alerts.look(time.monotonic()))

    def _put(self, queue: list[Record], fields: Record) -> None:
        if len(self._records) + len(self._events) < BACKLOG:
            queue.append(fields)
        else:
            self._dropped += 1

    async def _send(self) -> None:
        """Send batches, one call after the other, until the run ends and nothing waits."""
        while not self._closing or self._records or self._events:
            await self._due.wait()
            self._due.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            records = self._records
            self._records = []
            events = self._events
            self._events = []
            if records or events:
                await self._hand_on(records, events)

    async def _hand_on(self, records: list[Record], events: list[Record]) -> None:
        try:
            assert self.telemetry is not None
            problems = await self.telemetry.ask(lambda telemetry: telemetry.write.remote(records, events))
            for text in await problems:
                self.problem(text)
        except (HyphaError, RayError):
            self._dropped += len(records) + len(events)


class _UncommittedResponses:
    """Responses of rounds whose deltas aren't committed yet.

    The successor of a lost worker may respond to a prompt in another way. Only what was trained on is shown.

    Args:
        is_async: whether a commit may have deltas of several local rounds of a worker.

    """

    def __init__(self, is_async: bool) -> None:
        self._is_async = is_async
        self._by_source: dict[tuple[int, int], dict[int, list[Record]]] = {}
        """Responses by worker and incarnation, and by round, oldest first."""

    def hold(self, response: Record) -> None:
        """Keep a response until its delta is committed."""
        source = response["worker"], response["incarnation"]
        by_round = self._by_source.setdefault(source, {})
        by_round.setdefault(response["round"], []).append(response)

    def of(self, commit: Commit) -> list[Record]:
        """Remove and return the responses of a commit's deltas; those of lost and rejected deltas are dropped."""
        if self._is_async:
            for rejection in commit.rejected:
                for worker, incarnation in list(self._by_source):
                    if worker == rejection.worker:
                        self._pop((worker, incarnation), commit.round)
        responses: list[Record] = []
        for delta in commit.deltas:
            responses += self._pop((delta.worker, delta.incarnation), commit.round)
            self._forget_earlier(delta.worker, delta.incarnation)
        return responses

    def _pop(self, source: tuple[int, int], newest_round: int) -> list[Record]:
        """Remove and return the responses of one delta, which began in the round `newest_round` or before it.

        Without a barrier it is the worker's oldest one. Otherwise it is of that round, and older ones were lost.
        """
        by_round = self._by_source.get(source, {})
        rounds = [round_number for round_number in by_round if round_number <= newest_round]
        if self._is_async:
            return by_round.pop(min(rounds)) if rounds else []
        responses = by_round.get(newest_round, [])
        for round_number in rounds:
            del by_round[round_number]
        return responses

    def _forget_earlier(self, worker: int, incarnation: int) -> None:
        """Forget earlier incarnations of a worker."""
        for source in list(self._by_source):
            if source[0] == worker and source[1] < incarnation:
                del self._by_source[source]


class RoundTraces:
    """Spans of an attempt's rounds, each from the first plan to the end of all that was done for the round.

    A round is over some rounds later, so the end of its span is set then, in hindsight.

    Args:
        job: the job file.
        attempt: number of the scheduler, over the whole run.

    """

    def __init__(self, job: Job, attempt: int) -> None:
        self._job = job
        self._attempt = attempt
        self._most_open = job.sync.in_flight + 1 if job.sync.traits.has_barrier else OPEN_ROUNDS * job.num_workers
        self._spans: dict[int, Span] = {}
        """Open spans by round."""
        self._ended_ns: dict[int, int] = {}
        """Time of the last thing done for each of these rounds, in nanoseconds since 1970."""
        self._begun: dict[int, int] = {}
        """Round that each worker has begun last."""
        self._reductions: dict[int, int] = {}
        """Round of the reduction that made a commit's weights, by the commit's round, until the commit is written."""

    def follow(self, command: Command) -> None:
        """Start the span of a round with its first plan."""
        match command:
            case Assign(plan=plan):
                if plan.evaluate:
                    self._start(version_due(self._job, plan.round) - 1)
                if not plan.final:
                    self._start(plan.round)
            case Reduce(round=number):
                self._start(number)
            case Persist(round=number):
                self._reductions[number] = reduction_of(command)

    def hear(self, event: Input) -> None:
        """Extend the span of a round to what was done for it now."""
        match event:
            case Merged(source=source, version=version):
                self._extend(self.of_weights(version))
                self._extend(self._begun.get(source.worker, version))  # The worker may have dropped that round.
                self._begun[source.worker] = version
            case Evaluated(round=number):
                self._extend(version_due(self._job, number) - 1)
            case Delta(round=number):
                self._extend(number)
            case Reduced(verdict=verdict):
                self._extend(verdict.round)

    def committed(self, round: int) -> None:
        """Extend the span of the round whose reduction a commit has."""
        self._extend(self._reductions.pop(round))

    def of_weights(self, version: WeightsVersion) -> int:
        """Round that a transfer of weights counts for: the one whose result they are, or the first round."""
        return version - 1 if version - 1 in self._spans else version

    @contextmanager
    def transfer(self, round: int, direction: str, worker: int, **attributes: int) -> Iterator[None]:
        """Record the block as a transfer from a worker, ``up``, or to it, ``down``; none of a round without a span."""
        if round not in self._spans:
            yield
            return
        with traced("transfer", RoundKey(self._attempt, round), direction=direction, worker=worker, **attributes):
            yield
        self._extend(round)

    def end(self) -> None:
        """End all spans."""
        for round_number in list(self._spans):
            self._end(round_number)

    def _start(self, round_number: int) -> None:
        newest_round = max(self._spans, default=round_number)
        if round_number in self._spans or round_number <= newest_round - self._most_open:
            return
        started = start_round(RoundKey(self._attempt, round_number))
        if started is None:
            return
        self._spans[round_number] = started
        self._ended_ns[round_number] = now_ns()
        for older in list(self._spans):
            if older <= round_number - self._most_open:
                self._end(older)

    def _extend(self, round_number: int) -> None:
        if round_number in self._spans:
            self._ended_ns[round_number] = now_ns()

    def _end(self, round_number: int) -> None:
        self._spans.pop(round_number).end(self._ended_ns.pop(round_number))
