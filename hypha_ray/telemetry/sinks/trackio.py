"""Sink into trackio's database, shown by `trackio show`; alerts appear there too."""

from __future__ import annotations

import logging
import os
from typing import ClassVar

from hypha_ray.telemetry.alerts import ALERT
from hypha_ray.telemetry.sinks.files import Record, plain
from hypha_ray.telemetry.sinks.inputs import Curves, Labels, SinkPlace, numbers_of

PROJECT = "hypha_ray"
FOLDER = "trackio"


class Trackio:
    """A sink into the folder ``trackio`` of the run directory, one trackio run for every attempt of the job.

    Names and steps are those of `Curves`. An alert of the job is an alert of trackio, of the level ``warn``. The
    variables ``TRACKIO_DIR``, ``TRACKIO_SPACE_ID``, ``TRACKIO_SERVER_URL`` and ``TRACKIO_WEBHOOK_URL`` are those of
    trackio.
    """

    packages: ClassVar = ("trackio",)

    def __init__(self, sink_place: SinkPlace) -> None:
        self._name = sink_place.run
        self._folder = sink_place.folder / FOLDER
        self._curves = Curves()

    def start(self, config: Record) -> None:
        """Open a trackio run; neither the machine's load nor the user's name are tracked."""
        self._folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TRACKIO_DIR", str(self._folder))  # trackio reads this when it is imported.
        logging.getLogger("trackio.alerts").setLevel(logging.ERROR)  # Its warnings have a webhook's whole address.
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=self._name,
            group=self._name,
            config=plain(config) | _labels(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._run.config["_Username"] = None

    def record(self, record: Record) -> None:
        """Log every number of a record under its own name."""
        points = self._curves.points(record)
        if points is not None:
            self._run.log(points.values, step=points.step)

    def event(self, event: Record) -> None:
        """Pass an alert on; other events stay in events.jsonl."""
        if event["kind"] == ALERT:
            self._run.alert(title=event["alert"], text=event["text"], step=event["round"] or 0)

    def summary(self, figures: Record) -> None:
        """Log the figures of the whole run, at step 0."""
        self._run.log(numbers_of("summary", figures), step=0)

    def close(self) -> None:
        """End the trackio run, and write what waits."""
        self._run.finish()


def _labels(config: Record) -> Record:
    """Labels of the run as settings of their own, since trackio's runs have no others."""
    labels = Labels.of(config)
    settings = {"notes": labels.notes, "tags": ", ".join(labels.tags)}
    return {name: text for name, text in settings.items() if text}
