"""Client of the telemetry actor, which the scheduler never waits for."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from ray.exceptions import RayError

from hypha_ray.errors import HyphaError
from hypha_ray.scheduler.runtime.supervised_actor import SupervisedActor
from hypha_ray.telemetry.files import Record, stamped
from hypha_ray.telemetry.news import News

BACKLOG = 1000
"""Records and events that wait for a telemetry actor which is being replaced; more are dropped."""
BATCH_S, BATCH = 0.5, 100
"""Seconds that figures of steps wait for more of them, and the number that isn't waited with: a call costs 0.7 ms."""
FINISH_S = 10.0
"""Longest wait for telemetry at the end of a run."""


class TelemetryClient:
    """Hands records and events on in order, many with a call, to telemetry and to the driver; counts what it drops.

    Figures of steps, of which there is one a second for each worker, wait for others. Everything else is handed on at
    once, together with what waits: a scheduler that dies leaves no gap in what its successor goes on from.
    """

    def __init__(self) -> None:
        self.telemetry: SupervisedActor | None = None
        """Telemetry actor; None until it is started."""
        self._records: list[Record] = []
        self._events: list[Record] = []
        self._due = asyncio.Event()
        """What waits is to be sent now."""
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[None] | None = None
        """None until telemetry may open its files."""
        self._closing = False
        self._dropped = 0
        self._news = News()
        self._shown: list[dict[str, Any]] = []
        """Records that the driver hasn't been shown."""
        self._show_at = math.inf
        """When they are due, in monotonic seconds; infinity if there are none."""

    def open(self) -> None:
        """Let telemetry open its files; what was told before has waited for that."""
        self._sender = self._sender or asyncio.get_running_loop().create_task(self._send())

    def record(self, fields: Record) -> None:
        """Add a line to metrics.jsonl and the sinks, and show it to the driver."""
        self._put(self._records, fields)
        self._shown.append(dict(fields))
        waits_s = BATCH_S if fields["kind"] == "step" else 0.0
        self._show_at = min(self._show_at, time.monotonic() + waits_s)
        if not waits_s or len(self._records) >= BATCH:
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self._due.set)

    def event(self, fields: Record) -> None:
        """Add a line to events.jsonl, with the time of day; of what is news the driver hears, too."""
        self._news.take(fields)
        self._put(self._events, stamped(fields))
        self._due.set()

    def note(self, kind: str, **fields: Any) -> None:
        """Add an event of this moment."""
        self.event({"kind": kind, "monotonic_s": time.monotonic(), **fields})

    def for_driver(self, everything: bool = False) -> list[dict[str, Any]]:
        """Return records and lines of text that the driver should show now; at the end of a run everything that waits.

        Nothing is due for the sake of steps until the first of them has waited for `BATCH_S`.
        """
        now = time.monotonic()
        news = [{"kind": "news", "text": text} for text in self._news.lines(now, everything)]
        if not news and not everything and now < self._show_at:
            return []
        shown, self._shown, self._show_at = self._shown, [], math.inf
        return [*shown, *news]

    def replaced(self, name: str, reason: str) -> None:
        """An actor was replaced."""
        self.note("revive", role=name, reason=reason)

    async def finish(self, extra: Record) -> dict[str, Any]:
        """Hand on what waits, close the files and sinks, and return the summary; a run that failed has one too."""
        if self.telemetry is None:
            return {}
        self.open()
        self._closing = True
        self._due.set()
        try:
            if self._sender is not None:
                await asyncio.wait({self._sender}, timeout=FINISH_S)
            figures = {**extra, "dropped": self._dropped}
            ask = self.telemetry.ask(lambda telemetry: telemetry.finish.remote(figures))
            return dict(await (await asyncio.wait_for(ask, FINISH_S)))
        except (TimeoutError, RayError, HyphaError):
            return {}

    def _put(self, queue: list[Record], fields: Record) -> None:
        if len(self._records) + len(self._events) < BACKLOG:
            queue.append(fields)
        else:
            self._dropped += 1

    async def _send(self) -> None:
        """Send what is due, one call after the other, until all is sent at the end of the run."""
        while not self._closing or self._records or self._events:
            await self._due.wait()
            self._due.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            records, self._records = self._records, []
            events, self._events = self._events, []
            if records or events:
                await self._hand_on(records, events)

    async def _hand_on(self, records: list[Record], events: list[Record]) -> None:
        try:
            assert self.telemetry is not None
            ask = self.telemetry.ask(lambda telemetry: telemetry.write.remote(records, events))
            for text in await (await ask):
                self.note("problem", text=text)
        except (HyphaError, RayError):
            self._dropped += len(records) + len(events)
