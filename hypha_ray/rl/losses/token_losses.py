"""Contract of the losses of a policy, `rl.loss`: a function of `LossInputs`, or an object called with them.

It returns `TokenLosses`: a loss of each token. Aggregation, entropy bonus and the divergence of
`rl.kl_place = "loss"` come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from hypha_ray.config.tables.rl import RL
from hypha_ray.errors import ConfigError, reason_of


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Facts of the tokens of responses; tensors are float32 [responses, tokens], and padding has values, too."""

    logprobs: torch.Tensor
    """Log-probabilities of the trained policy, the only tensor with a gradient."""
    old_logprobs: torch.Tensor
    """Log-probabilities of the policy before this batch's steps, which ratios are taken to."""
    behaviour_logprobs: torch.Tensor
    """Log-probabilities that the tokens were sampled with, by weights that `rl.staleness` lets be older."""
    reference_logprobs: torch.Tensor | None
    """Log-probabilities of the reference; None without one."""
    advantages: torch.Tensor
    """Advantage of each token."""
    mask: torch.Tensor
    """1 for tokens that are trained on, 0 for all others."""
    correction: torch.Tensor | None
    """Weight of each token for what lies between its sampling and its training, which the loss is multiplied by.

    None without `rl.behaviour_cap` and `rl.staleness`.
    """
    settings: RL
    """Table `rl` of the job file."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Result of a loss; tensors are [responses, tokens]."""

    losses: torch.Tensor
    """Loss of each token."""
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of each token whose means over `mask` are recorded, by name."""


PolicyLoss: TypeAlias = Callable[[LossInputs], TokenLosses]
"""Loss of a policy."""
OWN_FIGURES = ("entropy", "kl", "logprob_gap")
"""Names of figures that are recorded with each loss."""


def checked(name: str, loss: PolicyLoss, inputs: LossInputs) -> TokenLosses:
    """Return the losses of tokens, if they have the form that the contract wants.

    Args:
        name: value of `rl.loss`.
        loss: function of that name.
        inputs: tokens.

    Raises:
        ConfigError: RL030, the loss raises or returns something else.

    """
    what = f"rl.loss {name} can't be trained on"
    fix = "see the contract of losses in docs/plugins-training.md"
    try:
        result = loss(inputs)
    except Exception as error:  # Code of users may raise anything.
        reason = reason_of(error)
        raise ConfigError("RL030", what, reason, "TokenLosses", fix) from error
    if not isinstance(result, TokenLosses):
        raise ConfigError("RL030", what, type(result).__name__, "TokenLosses", fix)
    shape = inputs.logprobs.shape
    for key, tensor in {"losses": result.losses, **result.figures}.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            got = f"{key}: {_kind(tensor)}"
            raise ConfigError("RL030", what, got, f"a value for each token, {list(shape)}", fix)
    if taken := [key for key in result.figures if key in OWN_FIGURES]:
        raise ConfigError("RL030", what, f"a figure {taken[0]!r}", f"names other than {', '.join(OWN_FIGURES)}", fix)
    if inputs.logprobs.requires_grad and not result.losses.requires_grad:
        raise ConfigError("RL030", what, "losses without a gradient", "losses computed from logprobs", fix)
    return result


def _kind(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
