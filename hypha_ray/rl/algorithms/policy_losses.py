"""Losses of a policy and their contract, `rl.loss`: a function of `LossInputs`, or an object called with them.

It returns `TokenLosses`: a loss of each token. Aggregation, entropy bonus and the divergence of
`rl.kl_place = "loss"` come after it. The built-in one, `clipped`, is the policy gradient of PPO and of its
successors.

The parts of losses are importance ratios, the clipped surrogate, estimators of KL(π ‖ reference), losses of values, and
aggregation. That gives each token's loss a weight, and the total that the weighted sum is divided by. Sums and totals
add up over micro-batches and workers, so neither changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from hypha_ray.config.rl import RL, Aggregation, Estimator, Ratio
from hypha_ray.config.training import (
    EVAL_FIELDS,
    OTHER_FIELDS,
    PREFERENCE_FIELDS,
    ROUND_FIELDS,
    STEP_FIELDS,
    TASK_FIELDS,
)
from hypha_ray.errors import ConfigError
from hypha_ray.model.losses import result_of
from hypha_ray.plugins import create

_TAKEN: Final = frozenset(
    {*ROUND_FIELDS, *TASK_FIELDS, *PREFERENCE_FIELDS, *EVAL_FIELDS, *STEP_FIELDS, *OTHER_FIELDS} - {"clip_share"}
)
"""Names that figures of a loss can't have, as records have them already."""
_TAKEN_TABLES: Final = ("reward", "validation", "metric", "time_shares")
"""Beginnings of such names, before a slash."""
_LOGPROBS = ((-1.0, -0.5, -2.0), (-0.1, -3.0, -1.0))
_ADVANTAGES = ((1.0, 1.0, 1.0), (-0.5, -0.5, -0.5))
_MASK = ((1.0, 1.0, 0.0), (1.0, 1.0, 1.0))
_CLOSE = 1e-5
"""Tolerance of two computations of a loss, relative and absolute."""
_LARGEST_LOG = 20.0
"""Bound of a ratio's logarithm, so that no ratio is infinite."""
Weights = tuple[torch.Tensor, int]
"""Weight of each token, [responses, tokens], and the total."""


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
        if not _is_free(key):
            raise ConfigError("RL030", problem, f"a figure {key!r}", "a name that no figure of records has", fix)
    if inputs.logprobs.requires_grad and not result.losses.requires_grad:
        raise ConfigError("RL030", problem, "losses without a gradient", "losses computed from logprobs", fix)
    return result


def _is_free(name: object) -> bool:
    """Whether a figure of a loss may have this name."""
    if not isinstance(name, str):
        return False
    table, _, _ = name.partition("/")
    return name not in _TAKEN and table not in _TAKEN_TABLES


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
        _require_separate(name, loss, inputs, result.losses)


def _require_separate(name: str, loss: PolicyLoss, inputs: LossInputs, joint_losses: torch.Tensor) -> None:
    """Refuse a loss of tokens that depends on other responses of the batch, which micro-batches divide.

    Raises:
        ConfigError: RL030.

    """
    for row in range(len(joint_losses)):
        response = _row_of(inputs, row)
        losses = checked(name, loss, response).losses
        is_trained = response.mask[0] != 0
        if not torch.allclose(losses[0, is_trained], joint_losses[row, is_trained], rtol=_CLOSE, atol=_CLOSE):
            problem = f"rl.loss {name} can't be trained on"
            fix = "take no sums or means over responses: rl.aggregation weighs tokens afterwards"
            got = "losses of a response that depend on others of its batch"
            raise ConfigError("RL030", problem, got, "losses of each response by itself", fix)


def _row_of(inputs: LossInputs, row: int) -> LossInputs:
    """Return the inputs of one response."""
    tensors: dict[str, Any] = {}
    for member in fields(inputs):
        value = getattr(inputs, member.name)
        tensors[member.name] = value[row, None] if isinstance(value, torch.Tensor) else value
    return LossInputs(**tensors)


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


def token_ratio(new_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Ratio of each token's probability to the one it was sampled with (PPO, arXiv 1707.06347).

    Args:
        new_logprobs: log-probabilities of the trained policy, [responses, tokens].
        old_logprobs: log-probabilities of the policy that sampled, of the same shape.
        mask: 1 for a response's tokens, 0 for padding; unused.

    """
    return (new_logprobs - old_logprobs).clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()


def sequence_ratio(new_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Geometric mean of a response's token ratios, for each token (GSPO, arXiv 2507.18071).

    The value is the mean's, the gradient flows through the token. Arguments are those of `token_ratio`.
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    mean = ((new_logprobs - old_logprobs) * mask).sum(1, keepdim=True) / lengths
    logarithm = new_logprobs - new_logprobs.detach() + mean.detach()
    return logarithm.clamp(max=_LARGEST_LOG / 2).exp()


def clipped(
    ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, dual: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip the surrogate -A·ρ to ratios between 1 - `low` and 1 + `high` (arXiv 1707.06347, 2503.14476).

    Args:
        ratio: ρ, [responses, tokens].
        advantage: A, of a shape that broadcasts.
        low: clip range below 1.
        high: clip range above 1.
        dual: largest ratio that counts beside a negative advantage (dual clip, arXiv 1912.09729); None: no limit.

    Returns:
        Loss of each token, and whether the clipping has taken its gradient.

    """
    plain_loss = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain_loss, bounded)
    is_clipped = bounded > plain_loss
    if dual is None:
        return loss, is_clipped
    limit = -advantage * dual
    is_beyond = (advantage < 0) & (loss > limit)
    return torch.where(is_beyond, limit, loss), is_clipped | is_beyond


def truncated_weight(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """Importance weight of a token for the policy that sampled it: min(π/μ, cap).

    It corrects for an engine whose log-probabilities differ from those of the trainer (truncated importance sampling,
    arXiv 2505.24298; IMPALA, arXiv 1802.01561).

    Args:
        proximal: log-probabilities of the trainer before its steps, [responses, tokens].
        behaviour: log-probabilities that the engine sampled with, of the same shape.
        cap: largest weight.

    """
    logarithm = (proximal - behaviour).clamp(max=_LARGEST_LOG)
    return logarithm.exp().clamp(max=cap)


def decoupled_weight(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Importance weight of a token that older weights have sampled: π/μ, or 0 if that is above `cap`.

    With it, clipping is around the proximal policy instead of the one that sampled (decoupled PPO, arXiv 2110.00641).
    Tokens beyond the cap aren't trained on (AReaL, arXiv 2505.24298).

    Args:
        proximal: log-probabilities of the policy before its steps, [responses, tokens].
        behaviour: log-probabilities that the tokens were sampled with, of the same shape.
        cap: largest weight; None: no limit.

    """
    logarithm = (proximal - behaviour).clamp(max=_LARGEST_LOG)
    weight = logarithm.exp()
    return weight if cap is None else torch.where(weight > cap, 0.0, weight)


RATIOS: dict[Ratio, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
}
"""Functions of `rl.ratio`."""


def k1(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Log-ratio: unbiased, of high variance, negative for some tokens.

    Args:
        policy: log-probabilities of the policy, [responses, tokens].
        reference: log-probabilities of the reference, of the same shape.

    """
    return policy - reference


def k2(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: biased, of low variance; arguments as in `k1`."""
    return 0.5 * (policy - reference).square()


def k3(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Log-ratio with a control variate, r - 1 - log r: unbiased and never negative; arguments as in `k1`."""
    log = (reference - policy).clamp(-_LARGEST_LOG, _LARGEST_LOG)
    return log.exp() - log - 1


def adapted(coefficient: float, divergence: float, target: float, samples: int, horizon: int) -> float:
    """Adapt the coefficient of a divergence to a target for the divergence (arXiv 1909.08593, section 2.2).

    Args:
        coefficient: coefficient that the batch was rewarded with.
        divergence: mean divergence of a token in the batch.
        target: divergence that is aimed at.
        samples: number of responses in the batch.
        horizon: number of responses in which an error of a fifth or more changes the coefficient by a fifth.

    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)


ESTIMATORS: dict[Estimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Functions of `rl.kl_estimator`."""


def clipped_value_loss(
    new_values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the larger squared error, of the value or of the value clipped around the old one (arXiv 2005.12729).

    Args:
        new_values: values of the trained critic, [responses, tokens].
        old_values: values that advantages were computed with, of the same shape.
        returns: values to learn, of the same shape.
        clip: largest distance from the old value that is learned in one step.

    Returns:
        Loss of each token, and whether the clipping has taken its gradient.

    """
    loss = (new_values - returns).square()
    clipped_values = new_values.clamp(old_values - clip, old_values + clip)
    bounded = (clipped_values - returns).square()
    return 0.5 * torch.maximum(loss, bounded), bounded > loss


def by_token(mask: torch.Tensor, responses: int, longest: int) -> Weights:
    """Let each token count the same: the mean over all tokens (DAPO, arXiv 2503.14476).

    Args:
        mask: 1 for a response's tokens, 0 for padding and for responses that are left out, [responses, tokens].
        responses: number of responses that a mean over responses is of; unused.
        longest: largest number of tokens of a response; unused.

    """
    return mask, int(mask.sum())


def by_sequence(mask: torch.Tensor, responses: int, longest: int) -> Weights:
    """Let each response count the same: the mean of responses' means (GRPO, arXiv 2402.03300); as `by_token`."""
    lengths = mask.sum(1, keepdim=True)
    return mask / lengths.clamp(min=1), responses


def by_constant(mask: torch.Tensor, responses: int, longest: int) -> Weights:
    """Divide each response's sum by the largest length (Dr. GRPO, arXiv 2503.20783); arguments as in `by_token`."""
    return mask, longest * responses


AGGREGATIONS: dict[Aggregation, Callable[[torch.Tensor, int, int], Weights]] = {
    "token": by_token,
    "sequence": by_sequence,
    "constant": by_constant,
}
"""Functions of `rl.aggregation`."""
