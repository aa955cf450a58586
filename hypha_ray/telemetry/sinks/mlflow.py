"""Sink into MLflow: a database in the run directory, or the server that the environment names."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from hypha_ray.telemetry.sinks.files import Record, plain
from hypha_ray.telemetry.sinks.inputs import Curves, Labels, SinkPlace, numbers_of

EXPERIMENT = "hypha_ray"
DATABASE = "mlflow.db"
_NOTES = "mlflow.note.content"
"""MLflow's own tag for the description of a run."""
_PARAMETERS = 100
_METRICS = 1000
"""Most parameters, and most metrics, that MLflow takes at once."""
_WAIT_S = 5.0
"""Age in seconds at which metrics are held back no more."""


class MLflow:
    """A sink into ``mlflow.db`` of the run directory, one MLflow run for every attempt of the job.

    Names and steps are those of `Curves`, with ``_`` for characters that MLflow's names lack, such as the @ of
    ``pass@1``. Metrics of some seconds are sent together, since a call has costs of its own, and for every name in it.
    ``MLFLOW_TRACKING_URI`` names a server instead, and ``MLFLOW_EXPERIMENT_NAME`` the experiment.
    """

    packages: ClassVar = ("mlflow", "sqlalchemy", "alembic")
    """Modules of mlflow; mlflow-skinny lacks the two for databases."""

    def __init__(self, sink_place: SinkPlace) -> None:
        self._name = sink_place.run
        self._directory = sink_place.folder
        self._losses = sink_place.losses
        self._curves = Curves()
        self._waiting: list[tuple[str, int | float, int, int]] = []
        """Name, value, time in milliseconds since 1970 and step of each metric to send."""
        self._waiting_records = 0
        self._waits_since_s = 0.0
        """Monotonic time of the first record that waits, in seconds."""
        self._run: str | None = None
        """Identifier of the MLflow run; None before there is one."""

    def start(self, config: Record) -> None:
        """Open an MLflow run, whose parameters are the keys of the job file."""
        self._directory.mkdir(parents=True, exist_ok=True)
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        logging.getLogger("alembic").setLevel(logging.ERROR)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{self._directory / DATABASE}")
        if self._run is None:  # An earlier start that failed later may have made a run.
            experiment = self._experiment(is_local=uri is None)
            run = self._client.create_run(experiment, run_name=self._name, tags=_tags(Labels.of(config)))
            self._run = str(run.info.run_id)
        parameters = [Param(key, str(value)) for key, value in _leaves(plain(config)) if value is not None]
        for start in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + _PARAMETERS])

    def record(self, record: Record) -> None:
        """Log every number of a record under its own name, together with others of the same seconds."""
        points = self._curves.points(record)
        if points is None:
            return
        self._add(points.values, points.step)
        if time.monotonic() - self._waits_since_s >= _WAIT_S:
            self._send()

    def event(self, event: Record) -> None:
        """Do nothing: events stay in events.jsonl."""

    def summary(self, figures: Record) -> None:
        """Log the figures of the whole run, at step 0."""
        self._add(numbers_of("summary", figures), 0)
        self._send()

    def close(self) -> None:
        """Send what waits, and end the MLflow run."""
        try:
            self._send()
        finally:
            self._client.set_terminated(self._run)

    def _experiment(self, is_local: bool) -> str:
        """Identifier of the experiment, which is made if there is none of its name."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        artifacts = (self._directory / "mlflow").as_uri() if is_local else None
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _add(self, values: Mapping[str, int | float], step: int) -> None:
        if not self._waiting_records:
            self._waits_since_s = time.monotonic()
        now_ms = int(time.time() * 1000)
        for name, value in values.items():
            self._waiting.append((_allowed_name(name), value, now_ms, step))
        self._waiting_records += 1

    def _send(self) -> None:
        """Send all metrics that wait; if that fails, each of their records is lost."""
        from mlflow.entities import Metric

        metrics = [Metric(*fields) for fields in self._waiting]
        records = self._waiting_records
        self._waiting.clear()
        self._waiting_records = 0
        try:
            for start in range(0, len(metrics), _METRICS):
                self._client.log_batch(self._run, metrics=metrics[start : start + _METRICS])
        except Exception as error:
            for _ in range(records - 1):  # The last one is counted by the caller.
                self._losses.fail(error)
            raise


def _allowed_name(name: str) -> str:
    """Name with ``_`` for characters that MLflow's names lack."""
    return re.sub(r"[^\w.\-/ ]", "_", name)


def _tags(labels: Labels) -> dict[str, str]:
    """Tags of MLflow, which have a name and a value: each tag of the run under its own name."""
    tags = {_allowed_name(tag): tag for tag in labels.tags}
    if labels.notes is not None:
        tags[_NOTES] = labels.notes
    return tags


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of all values, with the values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
