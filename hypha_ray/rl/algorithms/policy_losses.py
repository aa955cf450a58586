"""Contract of the losses of a policy, `rl.loss`: a function of `LossInputs`, or an object called with them.

It returns `TokenLosses`: a loss of each token. Aggregation, entropy bonus and the divergence of
`rl.kl_place = "loss"` come after it.

Clipped policy gradient of PPO and of its successors, `rl.loss = "clipped"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeAlias

import torch

from hypha_ray.config.rl import RL
from hypha_ray.errors import ConfigError
from hypha_ray.model.losses import result_of
from hypha_ray.plugins import create
from hypha_ray.rl.algorithms.losses import RATIOS, clipped

OWN_FIGURES = ("entropy", "kl", "logprob_gap")
"""Names of figures that are recorded with each loss."""
_LOGPROBS = ((-1.0, -0.5, -2.0), (-0.1, -3.0, -1.0))
_ADVANTAGES = ((1.0, 1.0, 1.0), (-0.5, -0.5, -0.5))
_MASK = ((1.0, 1.0, 0.0), (1.0, 1.0, 1.0))


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
    """Importance weight of each token, π_proximal / π_sample, which the loss is multiplied by.

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


def checked(name: str, loss: PolicyLoss, inputs: LossInputs) -> TokenLosses:
    """Return the losses of tokens, if they have the form that the contract wants.

    Args:
        name: value of `rl.loss`.
        loss: function of that name.
        inputs: tokens.

    Raises:
        ConfigError: RL030, the loss raises or returns something else.

    """
    problem = f"rl.loss {name} can't be trained on"
    fix = "see the contract of losses in docs/plugins-training.md"
    tensors = {member.name: getattr(inputs, member.name) for member in fields(inputs)}
    refused = partial(ConfigError, "RL030", problem, fix=fix)
    result = result_of(partial(loss, inputs), tensors, "TokenLosses", refused)
    if not isinstance(result, TokenLosses):
        raise ConfigError("RL030", problem, type(result).__name__, "TokenLosses", fix)
    shape = inputs.logprobs.shape
    for key, tensor in {"losses": result.losses, **result.figures}.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            got = f"{key}: {_kind(tensor)}"
            raise ConfigError("RL030", problem, got, f"a value for each token, {list(shape)}", fix)
    for key in result.figures:
        if key in OWN_FIGURES:
            reserved = ", ".join(OWN_FIGURES)
            raise ConfigError("RL030", problem, f"a figure {key!r}", f"names other than {reserved}", fix)
    if inputs.logprobs.requires_grad and not result.losses.requires_grad:
        raise ConfigError("RL030", problem, "losses without a gradient", "losses computed from logprobs", fix)
    return result


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return type(value).__name__


def try_loss(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a loss with and without a reference and a correction.

    Raises:
        ConfigError: RL030, it raises, returns something else, or has no finite gradient.

    """
    loss: PolicyLoss = create("rl_losses", name, options)
    for inputs in _examples():
        result = checked(name, loss, inputs)
        loss_of_batch = (result.losses * inputs.mask).sum()
        (gradient,) = torch.autograd.grad(loss_of_batch, inputs.logprobs)
        if not gradient.isfinite().all():
            problem = f"rl.loss {name} can't be trained on"
            fix = "keep logarithms and powers in range"
            raise ConfigError("RL030", problem, "a gradient that isn't finite", "finite numbers", fix)


def _examples() -> Iterator[LossInputs]:
    logprobs = torch.tensor(_LOGPROBS)
    for reference in (None, logprobs + 0.1):
        yield LossInputs(
            logprobs=logprobs.clone().requires_grad_(),
            old_logprobs=logprobs - 0.2,
            behaviour_logprobs=logprobs - 0.3,
            reference_logprobs=reference,
            advantages=torch.tensor(_ADVANTAGES),
            mask=torch.tensor(_MASK),
            correction=None if reference is None else reference.exp(),
            settings=RL(algorithm="grpo"),
        )


def loss(inputs: LossInputs) -> TokenLosses:
    """Clip the surrogate of advantages and importance ratios, by `rl.ratio`, `rl.clip_low`, `rl.clip_high` and so on.

    A figure is the share of tokens whose gradient the clipping has taken, `clip_share`.
    """
    rl = inputs.settings
    recipe = inputs.settings.recipe
    ratio = RATIOS[recipe.ratio](inputs.logprobs, inputs.old_logprobs, inputs.mask)
    losses, is_clipped = clipped(ratio, inputs.advantages, recipe.clip_low, recipe.clip_high, rl.dual_clip)
    if inputs.correction is not None:
        losses = losses * inputs.correction
    return TokenLosses(losses, {"clip_share": is_clipped})
