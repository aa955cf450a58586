"""Losses of single tokens: importance ratios, the clipped surrogate, estimators of KL(π ‖ reference), losses of values.

Aggregation gives each token's loss a weight, and the total that the weighted sum is divided by. Sums and totals add up
over micro-batches and workers, so neither changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hypha_ray.config.rl import Aggregation, Estimator, Ratio

_LARGEST_LOG = 20.0
"""Bound of a ratio's logarithm, so that no ratio is infinite."""
Weights = tuple[torch.Tensor, int]
"""Weight of each token, [responses, tokens], and the total."""


def token_ratio(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Ratio of each token's probability to the one it was sampled with (PPO, arXiv 1707.06347).

    Args:
        new: log-probabilities of the trained policy, [responses, tokens].
        old: log-probabilities of the policy that sampled, of the same shape.
        mask: 1 for a response's tokens, 0 for padding; unused.

    """
    return (new - old).clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()


def sequence_ratio(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Geometric mean of a response's token ratios, for each token (GSPO, arXiv 2507.18071).

    The value is the mean's, the gradient flows through the token. Arguments are those of `token_ratio`.
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    mean = ((new - old) * mask).sum(1, keepdim=True) / lengths
    logarithm = new - new.detach() + mean.detach()
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
    plain = -advantage * ratio
    bounded = -advantage * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, bounded)
    is_clipped = bounded > plain
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
    new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the larger squared error, of the value or of the value clipped around the old one (arXiv 2005.12729).

    Args:
        new: values of the trained critic, [responses, tokens].
        old: values that advantages were computed with, of the same shape.
        returns: values to learn, of the same shape.
        clip: largest distance from the old value that is learned in one step.

    Returns:
        Loss of each token, and whether the clipping has taken its gradient.

    """
    loss = (new - returns).square()
    clipped_values = new.clamp(old - clip, old + clip)
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
