"""Sums of an evaluation as figures: one rule, by which a run and `jobs/evaluate.py` report the same."""

from __future__ import annotations

import math


def quality(loss_sum: float, count: int, correct: int | None, perplexity: bool) -> dict[str, float | None]:
    """Return the mean loss of what was scored, and what it amounts to: accuracy, perplexity or neither.

    Args:
        loss_sum: over all that was scored.
        count: how many scores that is.
        correct: how many of them had the right class on top; None where there are no classes.
        perplexity: the loss is the cross entropy of tokens, in nats.

    Returns:
        `val_loss`, and `accuracy` or `perplexity` where one makes sense. A figure that isn't finite is None.

    """
    loss = loss_sum / count if count and math.isfinite(loss_sum) else None
    if correct is not None:
        return {"val_loss": loss, "accuracy": correct / count if count else None}
    if perplexity:
        return {"val_loss": loss, "perplexity": _exp(loss)}
    return {"val_loss": loss}


def _exp(loss: float | None) -> float | None:
    """Return e to that power, or None where it is too large for a float."""
    return math.exp(loss) if loss is not None and loss < 709 else None
