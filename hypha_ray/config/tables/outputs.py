"""The tables of a job file about what a run keeps and reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hypha_ray.config.value_types import Count, Table, target


class Checkpoint(Table):
    """Which snapshots are written and kept; the commit log is always whole."""

    every_rounds: Count = Field(1, description="rounds between snapshots")
    keep: Count = Field(2, description="newest snapshots that stay")
    failures: Count = Field(10, description="rounds in a row that the disk may refuse before the run ends")
    mirror: str | None = Field(None, description="folder or fsspec URL that a run is copied to")
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="what the trained model is saved in; default: as its repository or [model.config] has it"
    )


class Telemetry(Table):
    """Destinations of metrics."""

    sinks: list[Literal["console", "jsonl", "prometheus", "otel", "aim"]] = Field(
        ["console", "jsonl", "prometheus"], fail_fast=True, description="metrics.jsonl is always written"
    )
    aim_repository: str | None = Field(None, description="local Aim repository; default: the run directory")
    status_bridge: Annotated[str, AfterValidator(target)] | None = Field(
        None, description="host:port of a connector that every number is posted to"
    )
