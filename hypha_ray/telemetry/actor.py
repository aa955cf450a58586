"""The telemetry actor, the only writer of a run's metrics and events.

It runs on the node of the run directory, reserves no CPU, and lives as long as the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from hypha_ray.children import ListedActor
from hypha_ray.config.schema import Testing
from hypha_ray.config.training import WITHOUT_FILES
from hypha_ray.config.training import Telemetry as TelemetrySettings
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.telemetry.series import RECORDED_BYTES, recorded_bytes, summary
from hypha_ray.telemetry.sinks.base import build
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, SUMMARY, Record, read_jsonl, write_json

SUMMARY_EVENTS = ("attempt", "stop", "loss", "quarantine", "cost", "fleet_time")
"""Kinds of events that the summary is made of."""


class Telemetry(ListedActor):
    """Writes records and events to the run directory, and passes them to the job's other sinks.

    Failures of sinks don't reach the caller, see `sinks.base.Isolated`. Files are opened for appending, so a new actor
    continues the files of a dead one.

    Args:
        directory: the run directory.
        telemetry: table of the job file; the files are written with or without ``jsonl`` in its sinks.
        run: the run's name, the tag of all its metrics.
        config: the job without secrets.
        testing: failpoints to arm.

    """

    def __init__(
        self,
        directory: str,
        telemetry: TelemetrySettings,
        run: str,
        config: Record,
        testing: Testing | None = None,
    ) -> None:
        if testing is not None:
            arm(testing.failpoints, testing.failpoint_log)
        sinks_with_files = set(telemetry.sinks) - WITHOUT_FILES
        if telemetry.aim_repository is not None:
            sinks_with_files.discard("aim")
        if sinks_with_files:
            os.umask(0o077)  # Only the owner may read files of the run directory, trackers' files among them.
        self._directory = Path(directory)
        self._sinks = build(
            self._directory,
            run,
            telemetry.sinks,
            telemetry.aim_repository,
            telemetry.status_bridge,
            trackers=telemetry.trackers,
            options=telemetry.sinks_options,
        )
        if telemetry.alerts:
            from hypha_ray.telemetry.sinks.notifications import notifications

            self._sinks.add(notifications(telemetry.alerts, run))
        self._sinks.start(config)

    def write(self, records: Sequence[Record], events: Sequence[Record] = ()) -> list[str]:
        """Write records of metrics and events; returns problems of sinks that aren't reported yet."""
        failpoint("telemetry.write")
        for record in records:
            self._sinks.record(record)
        for event in events:
            self._sinks.event(event)
        return self._sinks.problems()

    @ray.method(concurrency_group="pulse")
    def ping(self) -> int:
        """Process id; an answer shows that the actor is alive."""
        return os.getpid()

    def finish(self, closing_fields: Record) -> dict[str, Any]:
        """Write summary.json, close the sinks and return the summary.

        `closing_fields` is added to it; its `parameter_bytes` is the base of the run's traffic ratio.
        """
        sizes = recorded_bytes(self._directory)
        records = read_jsonl(self._directory / METRICS, kinds=("round", "eval"))
        events = read_jsonl(self._directory / EVENTS, kinds=SUMMARY_EVENTS)
        figures = {**summary(records, events, closing_fields.get("parameter_bytes")), **closing_fields}
        self._sinks.summary(figures)  # before the sinks are waited for: little time may be left
        self._sinks.close()
        final_record = {**figures, "sinks": self._sinks.losses(), RECORDED_BYTES: sizes}
        with contextlib.suppress(OSError):  # counted already, when the summary was written first
            write_json(self._directory / SUMMARY, final_record)
        return final_record
