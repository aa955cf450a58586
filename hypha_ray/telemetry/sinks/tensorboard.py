"""Sink into TensorBoard's files, shown by `tensorboard --logdir`."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks.files import Record, plain

FOLDER = "tensorboard"


def check() -> None:
    """Refuse TensorBoard where it isn't installed.

    Raises:
        ConfigError: CFG022.

    """
    if importlib.util.find_spec("tensorboard") is None:
        what = "telemetry.sinks has tensorboard, which isn't installed"
        raise ConfigError("CFG022", what, fix="pip install tensorboard, or leave it out of telemetry.sinks")


class TensorBoard:
    """A sink into the folder ``tensorboard`` of the run directory.

    Tags are ``round/loss``, ``round/batches/worker-3``, ``eval/val_loss`` and ``worker-3/loss``. Steps of rounds and
    evaluations are round numbers, those of workers count reports of this attempt. Values have the 32 bits of
    TensorBoard's format.

    Args:
        directory: the run directory.

    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._reports: Counter[str] = Counter()

    def start(self, config: Record) -> None:
        """Open a file, and write the configuration as a text."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder))
        rows = "".join(f"    {key}: {value}\n" for key, value in plain(config).items())
        self._writer.add_text("config", rows)

    def record(self, record: Record) -> None:
        """Add every number of a record under its own name."""
        match record.get("kind"):
            case "round" | "eval" as kind:
                self._add(kind, record, record["round"])
                for name in ("batches", "batch_s"):
                    for worker, value in (record.get(name) or {}).items():
                        self._add(kind, {f"{name}/worker-{worker}": value}, record["round"])
            case "step":
                worker = f"worker-{record['worker']}"
                self._add(worker, record, self._reports[worker])
                self._reports[worker] += 1

    def event(self, event: Record) -> None:
        """Do nothing: events stay in events.jsonl."""

    def summary(self, figures: Record) -> None:
        """Add the figures of the whole run, at step 0."""
        self._add("summary", figures, 0)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()

    def _add(self, group: str, record: Record, step: int) -> None:
        for name, value in plain(record).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("round", "worker"):
                self._writer.add_scalar(f"{group}/{name}", value, step)
