"""The tables of a job file about training: the dataset, the optimizers, and what a run keeps and reports."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from hypha_ray.config.tables.alerts import Alert
from hypha_ray.config.value_types import (
    Count,
    Fraction,
    NotNegative,
    Place,
    Positive,
    Table,
    hub_id,
    identifier,
    target,
)
from hypha_ray.plugins import Plugin

WITHOUT_FILES: Final = frozenset({"console", "jsonl", "prometheus", "otel"})
"""Built-in sinks that write no files, besides those that every run has."""


class DatasetShare(Table):
    """One dataset of a mixture."""

    path: Place | None = Field(None, description="as dataset.path")
    name: str | None = Field(None, description="as dataset.name")
    weight: Positive = Field(1.0, description="share of the samples, relative to the other weights")


class Dataset(Table):
    """The prepared dataset: a folder or URL, a name by which data nodes serve it, or a mixture of several."""

    path: Place | None = Field(None, description="prepared folder, or its URL: s3, gs, http, https, hf or file")
    name: str | None = Field(None, description="name in $HYPHA_RAY_HOME/datasets, or of data nodes")
    mix: list[DatasetShare] = Field([], fail_fast=True, description="datasets that every batch is mixed of, by weight")
    shards: Count = Field(1, description="data shard actors that serve it")
    cache_gb: NotNegative | None = Field(
        None, description="disk of each machine for slices of URLs; default: a fifth of what is free, at most 50"
    )
    locality: Literal["ignore", "prefer"] = Field(
        "ignore",
        description="prefer: of a dataset in parts, a worker first gets slices that its machine or site serves",
    )
    allow_quarantine: bool = Field(
        False,
        description="train on without damaged slices instead of ending; leave out bad samples, not their batches",
    )

    @property
    def given(self) -> bool:
        """Whether there is a dataset."""
        return bool(self.path or self.name or self.mix)

    @property
    def parts(self) -> list[Dataset]:
        """Datasets of the mixture, or this one alone."""
        parts = []
        for share in self.mix:
            source: dict[str, Any] = {"path": share.path, "name": share.name, "mix": []}
            parts.append(self.model_copy(update=source))
        return parts or [self]


class InnerOptimizer(Table):
    """Optimizer of every worker; in synchronous training, of the server, which steps on the mean gradient."""

    name: Annotated[str, AfterValidator(identifier), Plugin("inner_optimizers", checked=False)] = Field(
        "adamw", description="muon: for matrices, the rest by AdamW; or the name of a class of torch.optim"
    )
    name_options: dict[str, Any] | None = Field(None, description="options of your own inner optimizer")
    learning_rate: Positive = Field(1e-3, description="peak learning rate of AdamW and SGD")
    muon_learning_rate: Positive = Field(2e-2, description="peak learning rate of the matrices under muon")
    muon_step_length: Literal["original", "match_rms_adamw"] = Field(
        "original",
        description="muon's steps in rates: √max(1, outputs/inputs), or 0.2·√max(outputs, inputs), for AdamW's rates",
    )
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), strict=False, description="decay of AdamW's running averages")
    epsilon: Positive = Field(1e-8, description="AdamW's epsilon")
    k_aware: bool = Field(
        False, description="AdamW: steps as long as those on the mean gradient of all workers, which has less noise"
    )
    momentum: Fraction = Field(0.0, description="momentum of sgd; Muon's is 0.95")
    weight_decay: NotNegative = Field(0.1, description="weight decay, decoupled except for sgd")
    stochastic_rounding: bool = Field(
        False, description="weights of bfloat16: round steps at random, so that small ones aren't lost on average"
    )
    schedule: Annotated[str, Plugin("schedules")] = Field("constant", description="learning rate over inner steps")
    schedule_options: dict[str, Any] | None = Field(None, description="options of your own schedule")
    warmup_steps: int = Field(0, ge=0, description="inner steps of linear warm-up")
    total_steps: Count | None = Field(None, description="inner steps of the schedule; default: as planned")
    decay_steps: Count | None = Field(None, description="inner steps of wsd's decay; default: a fifth of total_steps")
    min_lr_rate: Fraction = Field(0.0, description="fraction of the peak rate at which schedules end, except constant")
    clip_norm: Positive | None = Field(1.0, description="gradient norm above which gradients are scaled down")


class OuterOptimizer(Table):
    """Optimizer of the parameter server, which steps on the mean delta."""

    name: Annotated[str, Plugin("outer_optimizers")] = Field(
        "nesterov", description="average: the workers' mean itself, which is nesterov with η = 1 and μ = 0"
    )
    name_options: dict[str, Any] | None = Field(None, description="options of your own outer optimizer")
    learning_rate: Positive = Field(0.7, description="η in θ ← θ + η(μv + Δ̄); for adam far smaller, such as 1e-3")
    momentum: Fraction = Field(0.9, description="μ in v ← μv + Δ̄")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.99), strict=False, description="decay of adam's running averages")
    epsilon: Positive = Field(1e-8, description="adam's epsilon")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate over the rounds")
    final_learning_rate: NotNegative | None = Field(
        None, description="η of the last round, unless the schedule is constant; default: a seventh of learning_rate"
    )


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
        None, description="folder that Aim, TensorBoard, W&B, MLflow and trackio share for all runs; default: the run's"
    )
    plots: bool = Field(True, description="draw the run's plots at its end; jobs/plot.py draws them at any time")
    report: bool = Field(True, description="write report.html at the run's end; jobs/report.py writes it at any time")
    aim_repository: str | None = Field(None, description="local Aim repository; default: telemetry.trackers")
    status_bridge: Annotated[str, AfterValidator(target)] | None = Field(
        None, description="host:port of a connector that every number is posted to"
    )
    alerts: list[Alert] = Field(
        [], fail_fast=True, description="conditions on metrics, and the webhooks or programs that are told of them"
    )
