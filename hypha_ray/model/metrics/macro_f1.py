"""Mean of the classes' F1 scores, `macro_f1`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch


class MacroF1:
    """Unweighted mean of F1 over the classes that are labelled or predicted, as scikit-learn's `macro` average."""

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> Mapping[str, float]:
        """Count by class the right predictions, and the predictions and labels together."""
        predicted = logits.argmax(-1)
        sums: Counter[str] = Counter()
        for label in labels[predicted == labels].tolist():
            sums[f"right/{label}"] += 1
        for label in torch.cat([predicted, labels]).tolist():
            sums[f"both/{label}"] += 1
        return sums

    def figure(self, sums: Mapping[str, float]) -> float:
        """Return the mean over classes; NaN without one."""
        scores: list[float] = []
        for name, both in sums.items():
            if name.startswith("both/"):
                label = name.removeprefix("both/")
                right = sums.get(f"right/{label}", 0.0)
                scores.append(2 * right / both)
        if not scores:
            return float("nan")
        return sum(scores) / len(scores)
