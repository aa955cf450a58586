"""Account of a run's cost over all attempts: each bill is an event, and events are never rewound."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypha_ray.scheduler.runtime.run_actors import RunActors
from hypha_ray.scheduler.runtime.telemetry_client import TelemetryClient
from hypha_ray.telemetry.sinks.files import EVENTS, read_jsonl


class CostBook:
    """Bills the leases of a run.

    Args:
        actors: actors of the run, with their leases.
        telemetry: takes bills as events.
        directory: the run directory, with events of earlier attempts.

    """

    def __init__(self, actors: RunActors, telemetry: TelemetryClient, directory: Path) -> None:
        self._actors = actors
        self._telemetry = telemetry
        self._events = directory / EVENTS

    async def recall(self) -> None:
        """Read the time up to which an earlier scheduler has billed the leases that were taken over."""
        if self._actors.leases.pays:
            bills = await asyncio.to_thread(lambda: list(read_jsonl(self._events, kinds=("cost",))))
            self._actors.leases.billed(max((bill["monotonic_s"] for bill in bills), default=0.0))

    def bill(self) -> dict[str, float]:
        """Cost since the last bill, as a field of a record; empty if no owner has terms."""
        cost = self._actors.leases.bill()
        if cost is None:
            return {}
        self._telemetry.note("cost", cost=cost)
        return {"cost": cost}
