"""Estimators of the divergence KL(π ‖ reference) from sampled tokens (Schulman, joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hypha_ray.config.tables.rl import Estimator

_LARGEST_LOG = 20.0


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


ESTIMATORS: dict[Estimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Functions of `rl.kl_estimator`."""
