"""What the scheduler tells the telemetry actor, without ever waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import RayError

from hypha_ray.errors import HyphaError
from hypha_ray.scheduler.post import Post
from hypha_ray.telemetry.news import News

BACKLOG = 1000
"""Records that wait for a telemetry actor which is being replaced; more are dropped."""
FINISH_S = 10.0
"""Longest wait for telemetry at the end of a run."""


class Reporter:
    """Hands on records and events in order, and counts what had to be dropped."""

    def __init__(self) -> None:
        self.telemetry: Post | None = None
        """Set once there is a crew."""
        self._open = asyncio.Event()
        self._telling: set[asyncio.Task[None]] = set()
        self._dropped = 0
        self._news = News()

    def open(self) -> None:
        """Let telemetry open its files; what was told before has waited for that."""
        self._open.set()

    def record(self, fields: Mapping[str, Any]) -> None:
        """A line for metrics.jsonl and the sinks."""
        self._tell(lambda telemetry: telemetry.write.remote([fields]))

    def event(self, fields: Mapping[str, Any]) -> None:
        """A line for events.jsonl; of what is news the driver hears, too."""
        self._news.take(fields)
        self._tell(lambda telemetry: telemetry.events.remote([fields]))

    def note(self, kind: str, **fields: Any) -> None:
        """The same, of this moment."""
        self.event({"kind": kind, "monotonic_s": time.monotonic(), **fields})

    def news(self, everything: bool = False) -> list[dict[str, Any]]:
        """Return lines of text that the driver should show now; at the end of a run everything that waits."""
        return [{"kind": "news", "text": text} for text in self._news.lines(time.monotonic(), everything)]

    def replaced(self, name: str, reason: str) -> None:
        """An actor was replaced."""
        self.note("revive", role=name, reason=reason)

    async def finish(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Close the files and sinks; a run that failed has a summary too."""
        if self.telemetry is None:
            return {}
        self.open()
        try:
            if self._telling:
                await asyncio.wait(self._telling, timeout=FINISH_S)
            figures = {**extra, "dropped": self._dropped}
            ask = self.telemetry.ask(lambda telemetry: telemetry.finish.remote(figures))
            return dict(await (await asyncio.wait_for(ask, FINISH_S)))
        except (TimeoutError, RayError, HyphaError):
            return {}

    def _tell(self, call: Callable[[Any], Any]) -> None:
        if len(self._telling) >= BACKLOG:
            self._dropped += 1
            return
        task = asyncio.get_running_loop().create_task(self._told(call))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _told(self, call: Callable[[Any], Any]) -> None:
        await self._open.wait()
        try:
            assert self.telemetry is not None
            for text in await (await self.telemetry.ask(call)) or ():  # Of events there is no answer.
                self.note("problem", text=text)
        except (HyphaError, RayError):
            self._dropped += 1
