"""Charts of figures over rounds, with their fields and units: the same for plots and for the page of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["", "%", "s", "B", "1/s", "tokens"]
"""Unit of an axis: a plain number, a fraction shown as a percentage, seconds, bytes, a rate, or a count of tokens."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over rounds that share a unit."""

    title: str
    unit: Unit
    labels: Mapping[str, str]
    """Labels of the curves, by the fields of a round's record."""
    needs: str | None = None
    """Field without which the chart isn't shown; None: it is shown with any of its curves."""


GRADIENT_NORM = "Norm of the gradient before clipping"
"""Title of the chart of what workers report."""
OPTIMIZATION = (
    Chart("Learning rate", "", {"learning_rate": "of the inner optimizer"}),
    Chart("Step of the global weights", "", {"update_norm": "L2 norm of their change"}),
)
POLICY = (
    Chart("Entropy of the policy", "", {"entropy": "entropy"}),
    Chart("Divergence from the reference", "", {"kl": "divergence"}),
    Chart("Length of responses", "tokens", {"response_tokens": "mean"}),
    Chart(
        "Shares of groups, responses and tokens",
        "%",
        {
            "equal_groups": "groups with equal rewards",
            "truncated": "responses that were cut off",
            "clip_share": "tokens that were clipped",
            "value_clip_share": "tokens whose value was clipped",
        },
    ),
    Chart("Loss of the critic", "", {"value_loss": "half the squared error"}),
)
"""Figures of reinforcement learning."""
SPEED = (
    Chart(
        "Samples a second, all workers", "1/s", {"samples_per_s": "samples", "train_samples_per_s": "while they train"}
    ),
    Chart(
        "Tokens a second, all workers",
        "1/s",
        {"tokens_per_s": "tokens", "scored_per_s": "of them scored", "train_tokens_per_s": "while they train"},
        needs="tokens_per_s",
    ),
    Chart("Utilisation of GPUs", "%", {"mfu": "of the dense peak of 16 bits"}),
)
WAITING = (
    Chart(
        "Part of worker time spent waiting",
        "%",
        {"idle_fraction": "at the barrier", "data_wait_fraction": "for data"},
    ),
    Chart("From the last delta to the last worker's new weights", "s", {"sync_s": "exchange"}),
    Chart("Staleness of deltas", "", {"staleness_mean": "mean", "staleness_max": "largest", "staleness": "steps"}),
)
PLAN = (
    Chart(
        "From the start of a round to its last delta",
        "s",
        {"finish_s": "actual", "predicted_s": "as planned"},
    ),
    Chart("Relative error of the plan", "%", {"plan_error": "error"}),
)
TRAFFIC = (
    Chart("Bytes in each round", "B", {"bytes_up": "up: deltas", "bytes_down": "down: weights"}),
    Chart("What encoding has cost", "", {"codec_error": "lost norm ÷ norm", "codec_cosine": "cosine"}),
)
FLEET = (
    Chart("Workers in the round", "", {"workers": "workers", "rejected": "deltas that were rejected"}),
    Chart("Goodput", "%", {"goodput": "goodput"}),
)
ALL_CHARTS = (*OPTIMIZATION, *POLICY, *SPEED, *WAITING, *PLAN, *TRAFFIC, *FLEET)
