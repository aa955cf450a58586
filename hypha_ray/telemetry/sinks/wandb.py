"""Sink into a run of Weights & Biases, offline unless the environment asks for its server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from hypha_ray.telemetry.sinks.files import Record, plain
from hypha_ray.telemetry.sinks.inputs import Curves, Labels, SinkPlace, numbers_of

PROJECT = "hypha_ray"
FINISH_S = 4.0
"""Longest wait for uploads at the end, in seconds; less than all sinks have together."""


class WeightsAndBiases:
    """A sink into the folder ``wandb`` of the run directory, one W&B run for every attempt of the job.

    Names and steps are those of `Curves`; W&B draws each curve over its own steps, ``round`` or ``worker-3/report``.
    ``WANDB_MODE`` or ``WANDB_API_KEY`` turn uploads on, and ``WANDB_PROJECT`` names the project.
    """

    packages: ClassVar = ("wandb",)

    def __init__(self, sink_place: SinkPlace) -> None:
        self._name = sink_place.run
        self._directory = sink_place.folder
        self._curves = Curves()
        self._groups: set[str] = set()

    def start(self, config: Record) -> None:
        """Open a W&B run; neither code, repository, machine, load, packages nor terminal output are tracked."""
        self._directory.mkdir(parents=True, exist_ok=True)
        _quieten(self._directory)
        import wandb

        labels = Labels.of(config)
        uploads = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY")
        settings = wandb.Settings(
            root_dir=str(self._directory),
            run_group=self._name,
            run_name=self._name,
            run_notes=labels.notes,
            run_tags=labels.tags or None,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            host="",
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            symlink=False,
            reinit="create_new",  # Global names of wandb are left to others in the process.
            finish_timeout=FINISH_S,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            **({} if uploads else {"mode": "offline"}),
        )
        self._run = wandb.init(config=plain(config), settings=settings)

    def record(self, record: Record) -> None:
        """Log every number of a record under its own name."""
        points = self._curves.points(record)
        if points is None:
            return
        if points.group not in self._groups:
            self._groups.add(points.group)
            self._run.define_metric(f"{points.group}/*", step_metric=points.axis)
        self._run.log({points.axis: points.step, **points.values})

    def event(self, event: Record) -> None:
        """Do nothing: events stay in events.jsonl."""

    def summary(self, figures: Record) -> None:
        """Add the figures of the whole run to the summary."""
        self._run.summary.update(numbers_of("summary", figures))

    def close(self) -> None:
        """End the W&B run, and wandb's own process: until that has ended, the file may lack the last records."""
        import wandb

        self._run.finish()
        wandb.teardown()


def _quieten(directory: Path) -> None:
    """Silence wandb before it is imported: no lines, which may have a URL's password, and no reports of its errors."""
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_CACHE_DIR", str(directory / "wandb" / "cache"))
