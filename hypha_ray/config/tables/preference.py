"""Table of training on preferences, and what is known of its losses without torch."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from hypha_ray.config.value_types import NotNegative, Positive, Table
from hypha_ray.plugins import Plugin, is_built_in

OF_JUDGED: Final = frozenset({"kto"})
"""Losses of answers that are judged one by one; the other built-in ones compare two answers."""
OF_LENGTH: Final = frozenset({"simpo", "orpo"})
"""Losses without a reference, whose rewards are means over an answer's tokens."""
SMOOTHED: Final = frozenset({"dpo", "robust", "simpo"})
"""Losses that take label_smoothing."""


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
