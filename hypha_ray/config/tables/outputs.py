"""The tables of a job file about what a run keeps and reports."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from hypha_ray.config.value_types import Count, Place, Table, hub_id, target
from hypha_ray.plugins import Plugin

WITHOUT_FILES: Final = frozenset({"console", "jsonl", "prometheus", "otel"})
"""Built-in sinks that write no files, besides those that every run has."""


class Checkpoint(Table):
    """Snapshots to write and to keep; the commit log is always complete."""

    every_rounds: Count = Field(1, description="rounds between snapshots")
    keep: Count = Field(2, description="number of newest snapshots that are kept")
    best: bool = Field(
        False, description="also keep the snapshot with the best evaluation, and save its model as model-best"
    )
    failures: Count = Field(10, description="consecutive rounds that may fail to be written before the run ends")
    mirror: Place | None = Field(None, description="folder or fsspec URL that a run is copied to")
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="dtype of the saved model; default: that of its repository or [model.config]"
    )
    push: Annotated[str, AfterValidator(hub_id)] | None = Field(
        None, description="owner/name of a hub's repository that the model is uploaded to in the end, by HF_TOKEN"
    )


class Telemetry(Table):
    """Destinations of metrics."""

    sinks: list[Annotated[str, Plugin("sinks")]] = Field(
        ["console", "jsonl", "prometheus"], fail_fast=True, description="metrics.jsonl is always written"
    )
    sinks_options: dict[str, Any] | None = Field(None, description="options of your own sinks: a table for each name")
    trackers: str | None = Field(
        None, description="folder that Aim, TensorBoard, W&B and MLflow share for all runs; default: the run directory"
    )
    plots: bool = Field(True, description="draw the run's plots at its end; jobs/plot.py draws them at any time")
    aim_repository: str | None = Field(None, description="local Aim repository; default: telemetry.trackers")
    status_bridge: Annotated[str, AfterValidator(target)] | None = Field(
        None, description="host:port of a connector that every number is posted to"
    )
