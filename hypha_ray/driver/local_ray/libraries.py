"""Libraries that the actors of a job load, loaded before workers are forked from this process."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.heavy_imports import uncollected

ACTORS = (
    "ray._private.workers.default_worker",
    "ray.util.state",
    "hypha_ray.data.actor",
    "hypha_ray.model.trained",
    "hypha_ray.scheduler.actor",
    "hypha_ray.server.fused",
    "hypha_ray.server.reduce",
    "hypha_ray.store.actor",
    "hypha_ray.telemetry.actor",
    "hypha_ray.worker.batch_size",
    "hypha_ray.worker.training.loop",
)
"""Modules that load what actors need."""


def load_libraries(job: Job) -> None:
    """Load them; what can't be loaded is left to the actors, whose errors say what is missing."""
    with uncollected():
        for name in (*ACTORS, *_of_model(job)):
            with suppress(ImportError):
                import_module(name)


def _of_model(job: Job) -> list[str]:
    """Modules with the job's model, as far as its configuration is on this machine."""
    config = job.model.config or {}
    if job.model.repository:
        with suppress(OSError, ValueError):
            file = Path(job.model.repository).expanduser() / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
    kind = str(config.get("model_type", "")).replace("-", "_")
    return [f"transformers.models.{kind}.modeling_{kind}"] if kind.isidentifier() else []
