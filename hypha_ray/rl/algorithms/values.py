"""Losses of a critic's values."""

from __future__ import annotations

import torch


def clipped_value_loss(
    new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error, that of the value clipped around the old one if it is larger (PPO2; arXiv 2005.12729).

    Args:
        new: values of the trained critic, [responses, tokens].
        old: values that advantages were computed with, of the same shape.
        returns: values to learn, of the same shape.
        clip: largest distance from the old value that is learned in one step.

    Returns:
        Loss of each token, and whether the clipping has taken its gradient.

    """
    loss = (new - returns).square()
    bounded = (new.clamp(old - clip, old + clip) - returns).square()
    return 0.5 * torch.maximum(loss, bounded), bounded > loss
