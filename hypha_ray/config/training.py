"""The tables of a job file about training: data, optimizers, preferences, alerts, and what a run keeps and reports."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field

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
    variable,
)
from hypha_ray.fleet_time import TIME_KINDS
from hypha_ray.plugins import Plugin, is_built_in

COMMIT_AGE: Final = "commit_age_s"
"""Metric of the clock: seconds since the last commit, or since the attempt began."""
WORKERS: Final = "workers"
"""Number of workers that are there now; a record of a round has those that took part in it."""
DERIVED: Final = (COMMIT_AGE, WORKERS)
"""Metrics that no record has; they are known at any time."""
ROUND_FIELDS: Final = (
    *("loss", "learning_rate", "update_norm", "rejected", "epoch", "cost", "round", "rounds", "workers"),
    *("time_s", "finish_s", "predicted_s", "plan_error", "elapsed_s", "eta_s", "sync_s"),
    *("goodput", "possible_samples", "fleet_s", "idle_fraction", "data_wait_fraction", "mfu"),
    *("samples", "samples_total", "samples_per_s", "train_samples_per_s", "scored", "scored_per_s"),
    *("tokens", "tokens_total", "tokens_per_s", "train_tokens_per_s"),
    *("bytes_up", "bytes_down", "codec_error", "codec_cosine"),
    *("arrivals", "staleness_mean", "staleness_max"),
)
"""Numeric fields of a round's record; docs/telemetry.md says what they are."""
TASK_FIELDS: Final = (
    *("reward", "absent_rewards", "equal_groups", "response_tokens", "truncated", "entropy", "clip_share", "kl"),
    *("kl_coefficient", "value_loss", "value_clip_share", "logprob_gap", "staleness"),
    *("turns", "extra_prompts", "scatters", "gathers", "broadcasts"),
    *("generation_s", "training_s", "by_generators"),
)
"""Figures of reinforcement learning, which are fields of rounds, reports and, some of them, of evaluations."""
PREFERENCE_FIELDS: Final = ("reward_chosen", "reward_rejected", "margin", "train_accuracy")
"""Figures of training on preferences, in all records; evaluations have `accuracy` instead of the last one."""
EVAL_FIELDS: Final = ("val_loss", "perplexity", "accuracy", "count", "seconds", "elapsed_s")
"""Numeric fields of an evaluation's record."""
STEP_FIELDS: Final = ("gradient_norm", "batch_s", "round_samples", "round_target")
"""Numeric fields that only a worker's report has."""
IN_REPORTS: Final = (*STEP_FIELDS, "loss", "learning_rate", "samples", "tokens", "scored", "elapsed_s")
"""All numeric fields of a worker's report, besides figures of the task."""
OTHER_FIELDS: Final = (
    *("kind", "worker", "incarnation", "batches", "bytes_from", "peak_memory_bytes"),
    *("time_shares", "time_by_worker", "mfu_by_worker", "wall_time", "monotonic_s"),
)
"""Fields of records that are no single number, or that tell whose a record is."""
SHARES: Final = tuple(f"time_shares/{kind}" for kind in TIME_KINDS)
"""Shares of the fleet's time in a round's record."""
RECORD_KINDS: Final = ("round", "eval", "step")
_OF_ROUNDS = re.compile(r"(reward|validation)/.+")
_OF_EVALUATIONS = re.compile(r"metric/.+|pass@[1-9]\d*")

MEDIANS: Final = ("above_median_times", "below_median_times")
"""Comparisons with a multiple of the median of earlier values."""
WITHOUT_FILES: Final = frozenset({"console", "jsonl", "prometheus", "otel"})
"""Built-in sinks that write no files, besides those that every run has."""
OF_JUDGED: Final = frozenset({"kto"})
"""Losses of answers that are judged one by one; the other built-in ones compare two answers."""
OF_LENGTH: Final = frozenset({"simpo", "orpo"})
"""Losses without a reference, whose rewards are means over an answer's tokens."""
SMOOTHED: Final = frozenset({"dpo", "robust", "simpo"})
"""Losses that take label_smoothing."""


class Metric(NamedTuple):
    """Place of an alert's metric: a field of a kind of records; a derived metric has no kind."""

    kind: str | None
    field: str

    @property
    def is_of_rl(self) -> bool:
        """Whether only jobs of reinforcement learning have it."""
        return self.field in TASK_FIELDS or self.field.startswith(("reward/", "validation/", "pass@"))


class Alert(Table):
    """Condition on a metric, and the channels that report it while it holds."""

    required = ("metric", "op", "value")
    metric: str | None = Field(
        None, description="field of a round, an evaluation or a report, or commit_age_s; see docs/telemetry.md"
    )
    op: Literal[">", ">=", "<", "<=", "above_median_times", "below_median_times"] | None = Field(
        None, description="comparison with value, or with value times the median of the last 20 values that were well"
    )
    value: Annotated[float, Field(allow_inf_nan=False)] | None = Field(None, description="number to compare with")
    for_rounds: Count | None = Field(None, description="rounds in a row for which the condition must hold")
    for_s: NotNegative | None = Field(None, description="seconds for which it must hold instead; 0: at once")
    name: str | None = Field(None, description="name of the alert; default: metric, op and value")
    message: str | None = Field(None, description="text for the reader, before the figures")
    url_env: Annotated[str, AfterValidator(variable)] | None = Field(
        None, description="environment variable with the address of a webhook, which gets a POST with JSON"
    )
    command: list[str] | None = Field(
        None,
        fail_fast=True,
        description="program and arguments to run, without a shell; figures are in its environment",
    )
    timeout_s: Positive = Field(30.0, description="seconds after which the webhook or the program is given up")

    @property
    def title(self) -> str:
        """Name, or the condition itself."""
        return self.name or f"{self.metric} {self.op} {self.value:g}"


def find_metric(name: str) -> Metric | None:
    """Return the place of a metric; None if no record has such a field.

    A name such as ``eval/reward`` says which kind of records is meant. Without one it is that of the rounds, if they
    have the field.
    """
    if name in DERIVED:
        return Metric(None, name)
    prefix, _, field = name.partition("/")
    if prefix in RECORD_KINDS and _has(prefix, field):
        return Metric(prefix, field)
    for kind in RECORD_KINDS:
        if _has(kind, name):
            return Metric(kind, name)
    return None


def nearest_metric(name: str) -> str | None:
    """Return the most similar name; None if no name is similar."""
    names = [*DERIVED, *ROUND_FIELDS, *TASK_FIELDS, *PREFERENCE_FIELDS, *EVAL_FIELDS, *STEP_FIELDS, *SHARES, "pass@1"]
    prefix, slash, field = name.partition("/")
    if not slash or prefix not in RECORD_KINDS:
        prefix = ""
        field = name
    field = field.lower().removeprefix("ray_").removeprefix("hypha_")  # Gauges are called so.
    matches = get_close_matches(field, names, n=1)
    if not matches:
        return None
    with_prefix = f"{prefix}/{matches[0]}"
    return with_prefix if prefix and find_metric(with_prefix) else matches[0]


def _has(kind: str, field: str) -> bool:
    """Whether a kind of records may have a field."""
    match kind:
        case "round":
            return field in (*ROUND_FIELDS, *TASK_FIELDS, *PREFERENCE_FIELDS, *SHARES) or bool(
                _OF_ROUNDS.fullmatch(field)
            )
        case "eval":
            return field in (*EVAL_FIELDS, *TASK_FIELDS, *PREFERENCE_FIELDS[:-1]) or bool(
                _OF_EVALUATIONS.fullmatch(field)
            )
        case _:
            return field in (*IN_REPORTS, *TASK_FIELDS, *PREFERENCE_FIELDS)


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


class Preference(Table):
    """Training on preferences: chosen and rejected answers, or answers that are judged one by one."""

    loss: Annotated[str, Plugin("preference_losses")] | None = Field(
        None, description="loss of preferences, or module:object of your own; default: none, training on the dataset"
    )
    loss_options: dict[str, Any] | None = Field(None, description="options of a loss of your own")
    beta: Positive = Field(0.1, description="strength of the tie to the reference; of orpo weight of the odds ratio")
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="probability that a preference is the wrong way round; of dpo, robust and simpo"
    )
    gamma: NotNegative = Field(0.5, description="simpo: margin of rewards to reach")
    desirable_weight: Positive = Field(1.0, description="kto: weight of desirable answers")
    undesirable_weight: Positive = Field(1.0, description="kto: weight of undesirable answers")
    reference: Literal["initial", "dataset", "none"] = Field(
        "initial",
        description="initial: the model as training begins, below an adapter its base; dataset: log-probabilities "
        "that prepare --reference has stored; none: a uniform one",
    )

    @property
    def uses_reference(self) -> bool:
        """Whether log-probabilities of a reference are part of the loss."""
        return self.loss is not None and self.loss not in OF_LENGTH and self.reference != "none"

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Kinds of answers that the loss takes: True judged ones, False compared ones."""
        if self.loss is None or not is_built_in("preference_losses", self.loss):
            return (False, True)
        return (self.loss in OF_JUDGED,)
