"""The table of a job file about alerts, and the names of all metrics that an alert may watch."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AfterValidator, Field

from hypha_ray.config.value_types import Count, NotNegative, Positive, Table, variable
from hypha_ray.fleet_time import TIME_KINDS

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
SHARES: Final = tuple(f"time_shares/{kind}" for kind in TIME_KINDS)
"""Shares of the fleet's time in a round's record."""
RECORD_KINDS: Final = ("round", "eval", "step")
_OF_ROUNDS = re.compile(r"(reward|validation)/.+")
_OF_EVALUATIONS = re.compile(r"metric/.+|pass@[1-9]\d*")

MEDIANS: Final = ("above_median_times", "below_median_times")
"""Comparisons with a multiple of the median of earlier values."""


class Metric(NamedTuple):
    """Place of an alert's metric: a field of a kind of records; a derived metric has no kind."""

    kind: str | None
    field: str

    @property
    def is_of_rl(self) -> bool:
        """Whether only jobs of reinforcement learning have it."""
        return self.field in TASK_FIELDS or self.field.startswith(("reward/", "validation/", "pass@"))


class Alert(Table):
    """Condition on a metric, and what is told of it when it holds."""

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
    """Return the name that was probably meant; None if none is near."""
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
