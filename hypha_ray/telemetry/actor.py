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

from hypha_ray.config.schema import Testing
from hypha_ray.failpoints import arm, failpoint
from hypha_ray.telemetry.sinks.base import build
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, SUMMARY, Record, read_jsonl, summary, write_json


class Telemetry:
    """Writes records and events to the run directory, and passes them to the job's other sinks.

    Failures of sinks don't reach the caller, see `sinks.Isolated`. Files are opened for appending, so a new actor
    continues those of a dead one.

    Args:
        directory: the run directory.
        sinks: names as in the job file; the files are written whether ``jsonl`` is there or not.
        run: the run's name, the tag of all its metrics.
        config: the job without secrets.
        aim_repository: a local folder; default: the run directory.
        testing: failpoints to arm.
        status_bridge: address of a connector that metrics are posted to.
        trackers: folder in which trackers keep all runs; None: the run directory.

    """

    def __init__(
        self,
        directory: str,
        sinks: Sequence[str],
        run: str,
        config: Record,
        aim_repository: str | None = None,
        testing: Testing | None = None,
        status_bridge: str | None = None,
        trackers: str | None = None,
    ) -> None:
        if testing is not None:
            arm(testing.failpoints, testing.failpoint_log)
        if {"tensorboard", "wandb", "mlflow"} & set(sinks) or ("aim" in sinks and aim_repository is None):
            os.umask(0o077)  # Trackers' files in the run directory are the owner's alone, as all others there.
        self._directory = Path(directory)
        self._sinks = build(self._directory, run, sinks, aim_repository, status_bridge, trackers=trackers)
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

    def finish(self, extra: Record) -> dict[str, Any]:
        """Write summary.json, close the sinks and return the summary.

        `extra` is added to it; its `parameter_bytes` is the base of the run's traffic ratio.
        """
        records = read_jsonl(self._directory / METRICS, kinds=("round", "eval"))
        events = read_jsonl(self._directory / EVENTS, kinds=("attempt", "stop", "loss", "quarantine", "cost"))
        figures = {**summary(records, events, extra.get("parameter_bytes")), **extra}
        self._sinks.summary(figures)  # before the sinks are waited for: little time may be left
        self._sinks.close()
        final = {**figures, "sinks": self._sinks.losses()}
        with contextlib.suppress(OSError):  # counted already, when the summary was written first
            write_json(self._directory / SUMMARY, final)
        return final
