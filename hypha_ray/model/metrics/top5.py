"""Share of labels among the five classes of the largest logits, `top5`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_CLASSES = 5


class Top5:
    """Top-5 accuracy."""

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> Mapping[str, float]:
        """Count labels that are among the first classes, and all labels."""
        best = logits.topk(min(_CLASSES, logits.shape[-1]), -1).indices
        right = (best == labels[..., None]).any(-1)
        return {"right": float(right.sum()), "all": float(right.numel())}

    def figure(self, sums: Mapping[str, float]) -> float:
        """Return the share; NaN without a label."""
        return sums["right"] / sums["all"] if sums.get("all") else float("nan")
