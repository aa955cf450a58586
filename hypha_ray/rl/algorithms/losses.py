"""Losses of single tokens: importance ratios, and the surrogate that is clipped around them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hypha_ray.config.tables.rl import Ratio

_LARGEST_LOG = 20.0
"""Bound of a ratio's logarithm, so that no ratio is infinite."""


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
    mean = ((new - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return (new - new.detach() + mean.detach()).clamp(max=_LARGEST_LOG / 2).exp()


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
    taken = bounded > plain
    if dual is None:
        return loss, taken
    limit = -advantage * dual
    beyond = (advantage < 0) & (loss > limit)
    return torch.where(beyond, limit, loss), taken | beyond


def truncated_weight(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """Weight of a token that another policy has sampled than the one which ratios are taken to: min(π/μ, cap).

    It corrects for an engine whose log-probabilities differ from those of the trainer (truncated importance sampling,
    arXiv 2505.24298; IMPALA, arXiv 1802.01561).

    Args:
        proximal: log-probabilities of the trainer before its steps, [responses, tokens].
        behaviour: log-probabilities that the engine sampled with, of the same shape.
        cap: largest weight.

    """
    return (proximal - behaviour).clamp(max=_LARGEST_LOG).exp().clamp(max=cap)


def decoupled_weight(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Weight of a token that older weights have sampled: π/μ, or 0 if that is above `cap`.

    With it, clipping is around the proximal policy instead of the one that sampled (decoupled PPO, arXiv 2110.00641).
    Tokens beyond the cap aren't trained on (AReaL, arXiv 2505.24298).

    Args:
        proximal: log-probabilities of the policy before its steps, [responses, tokens].
        behaviour: log-probabilities that the tokens were sampled with, of the same shape.
        cap: largest weight; None: no limit.

    """
    weight = (proximal - behaviour).clamp(max=_LARGEST_LOG).exp()
    return weight if cap is None else torch.where(weight > cap, 0.0, weight)


RATIOS: dict[Ratio, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
}
"""Functions of `rl.ratio`."""
