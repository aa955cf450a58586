"""Share of labels among the five classes of the largest logits, `top5`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_CLASSES = 5


class Top5:
    """Top-5 accuracy."""

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> Mapping[str, float]:
        """Count labels that are among the first classes, and all labels."""
        classes = min(_CLASSES, logits.shape[-1])
        best = logits.topk(classes, -1).indices
        matches = best == labels[..., None]
        right = matches.any(-1)
        return {"right": float(right.sum()), "all": float(right.numel())}

    def figure(self, sums: Mapping[str, float]) -> float:
        """Return the share; NaN without a label."""
        if not sums.get("all"):
            return float("nan")
        return sums["right"] / sums["all"]
