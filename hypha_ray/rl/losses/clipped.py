"""Clipped policy gradient of PPO and of its successors, `rl.loss = "clipped"`."""

from __future__ import annotations

from hypha_ray.rl.algorithms.losses import RATIOS, clipped
from hypha_ray.rl.losses.token_losses import LossInputs, TokenLosses


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
