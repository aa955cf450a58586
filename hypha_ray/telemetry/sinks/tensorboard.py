"""Sink into TensorBoard's files, shown by `tensorboard --logdir`."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from hypha_ray.telemetry.sinks.files import METRICS, Record, plain, read_jsonl
from hypha_ray.telemetry.sinks.inputs import Curves, Labels, SinkPlace, numbers_of

FOLDER = "tensorboard"


class TensorBoard:
    """A sink into a folder of TensorBoard's files.

    Tags and steps are those of `Curves`. Values have the 32 bits of TensorBoard's format. A later attempt writes the
    files anew from ``metrics.jsonl``, which lacks rounds that are trained again; so each step of a tag has one value.

    The folder is ``tensorboard`` in the run directory, or the folder of the run's name in that of all runs.
    """

    packages: ClassVar = ("tensorboard",)

    def __init__(self, sink_place: SinkPlace) -> None:
        self._metrics = sink_place.directory / METRICS
        self._folder = sink_place.directory / FOLDER
        if sink_place.trackers is not None:
            self._folder = sink_place.trackers / FOLDER / sink_place.run
        self._curves = Curves()
        self._earlier_bytes = self._metrics.stat().st_size if self._metrics.exists() else 0
        """Size of the earlier attempts' records; later ones come by `record`."""

    def start(self, config: Record) -> None:
        """Open a file, and write the configuration as a text and the records of earlier attempts."""
        from torch.utils.tensorboard import SummaryWriter

        self._curves = Curves()  # A start that failed half-way has counted reports already.
        for file in self._folder.glob("events.out.tfevents.*"):
            file.unlink()
        # A reader that has read the former files drops all of their steps.
        self._writer = SummaryWriter(str(self._folder), purge_step=0)
        rows = [f"    {key}: {value}\n" for key, value in plain(config).items()]
        self._writer.add_text("config", "".join(rows))
        labels = Labels.of(config)
        if labels.notes is not None:
            self._writer.add_text("notes", labels.notes)
        if labels.tags:
            self._writer.add_text("tags", ", ".join(labels.tags))
        for record in read_jsonl(self._metrics, end=self._earlier_bytes):
            self.record(record)

    def record(self, record: Record) -> None:
        """Add every number of a record under its own name."""
        points = self._curves.points(record)
        if points is not None:
            self._add(points.values, points.step, _seconds(record.get("wall_time")))

    def event(self, event: Record) -> None:
        """Do nothing: events stay in events.jsonl."""

    def summary(self, figures: Record) -> None:
        """Add the figures of the whole run, at step 0."""
        self._add(numbers_of("summary", figures), 0)

    def close(self) -> None:
        """Write queued values, and close the file."""
        self._writer.close()

    def _add(self, values: dict[str, int | float], step: int, wall_time_s: float | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        file_writer = self._writer.file_writer
        assert file_writer is not None  # None only after the writer is closed.
        # One event for all of them costs a fifth of an event for each.
        file_writer.add_summary(Summary(value=scalars), step, wall_time_s)


def _seconds(wall_time: object) -> float | None:
    """Return a time of day in seconds since 1970; None if it isn't known."""
    if not isinstance(wall_time, str):
        return None
    return datetime.fromisoformat(wall_time).timestamp()
