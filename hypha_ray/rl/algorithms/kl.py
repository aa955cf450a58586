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


def adapted(coefficient: float, divergence: float, target: float, samples: int, horizon: int) -> float:
    """Move the coefficient of a divergence so that the divergence comes to its target (arXiv 1909.08593, section 2.2).

    Args:
        coefficient: coefficient that the batch was rewarded with.
        divergence: mean divergence of a token in the batch.
        target: divergence to come to.
        samples: number of responses in the batch.
        horizon: number of responses in which an error of a fifth or more changes the coefficient by a fifth.

    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)


ESTIMATORS: dict[Estimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Functions of `rl.kl_estimator`."""
