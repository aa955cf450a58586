"""Sink into TensorBoard's files, shown by `tensorboard --logdir`."""

from __future__ import annotations

from pathlib import Path

from hypha_ray.telemetry.sinks.files import Record, plain
from hypha_ray.telemetry.sinks.trackers import Curves, numbers_of

FOLDER = "tensorboard"


class TensorBoard:
    """A sink into the folder ``tensorboard`` of the run directory.

    Tags and steps are those of `Curves`. Values have the 32 bits of TensorBoard's format.

    Args:
        directory: the run directory.

    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._curves = Curves()

    def start(self, config: Record) -> None:
        """Open a file, and write the configuration as a text."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder))
        rows = "".join(f"    {key}: {value}\n" for key, value in plain(config).items())
        self._writer.add_text("config", rows)

    def record(self, record: Record) -> None:
        """Add every number of a record under its own name."""
        if points := self._curves.points(record):
            self._add(points.values, points.step)

    def event(self, event: Record) -> None:
        """Do nothing: events stay in events.jsonl."""

    def summary(self, figures: Record) -> None:
        """Add the figures of the whole run, at step 0."""
        self._add(numbers_of("summary", figures), 0)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()

    def _add(self, values: dict[str, int | float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
