"""Ids that stand for tokens, and settings of a model's generation by them.

A model may have further rows, as weights are padded; its policy never chooses those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from hypha_ray.model.loading.tokenizer import named_ends

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def settle_generation(network: PreTrainedModel, preprocessor: Any | None) -> list[int]:
    """Let a model's generation end where answers end, and leave out ids that stand for no token.

    Args:
        network: the model, whose settings of generation are changed.
        preprocessor: its tokenizer, or a processor that has one; without any nothing changes.

    Returns:
        Ids of the tokens that end an answer.

    """
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    settings = getattr(network, "generation_config", None)
    if settings is None or not network.can_generate() or not hasattr(tokenizer, "get_vocab"):
        return []
    rows = network.config.get_text_config().vocab_size
    ends = [one for one in named_ends(network, tokenizer) if one < rows]
    settings.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
    unknown = vocabulary_of(tokenizer).unknown(rows)
    own = settings.suppress_tokens or []
    if max(own, default=None) == rows - 1:
        own = []  # They were written by an earlier export, whose tokenizer may have had fewer tokens.
    settings.suppress_tokens = sorted({*own, *unknown}) or None
    return ends
