"""Ids that stand for tokens. A model may have further rows, as weights are padded; its policy never chooses those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

_NEVER = torch.finfo(torch.float32).min / 2
"""Logit of an id in a gap: its probability is 0, and so is its part of an entropy, which -∞ would make NaN."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids of a tokenizer."""

    size: int | None = None
    """One more than the largest id; None: each row of a model is a token."""
    gaps: tuple[int, ...] = ()
    """Smaller ids that stand for nothing."""

    def __contains__(self, token: int) -> bool:
        return token >= 0 and (self.size is None or token < self.size) and token not in self.gaps

    def known(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits, [..., rows], of the tokens alone: [..., size], with those of the gaps at no probability."""
        logits = logits[..., : self.size]
        if not self.gaps:
            return logits
        return logits.index_fill(-1, torch.tensor(self.gaps, device=logits.device), _NEVER)

    def unknown(self, rows: int) -> list[int]:
        """Return the ids of a model with that many rows that stand for nothing."""
        return [*self.gaps, *range(rows if self.size is None else self.size, rows)]


EVERY_ROW: Final = Vocabulary()
"""Vocabulary in which each row of a model is a token."""


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a tokenizer; all rows of a model count if the tokenizer doesn't list its tokens."""
    listed = getattr(tokenizer, "get_vocab", None)
    ids = set(listed().values()) if listed is not None else set()
    if not ids:
        return EVERY_ROW
    size = max(ids) + 1
    return Vocabulary(size, tuple(sorted(set(range(size)) - ids)) if len(ids) < size else ())
