"""Ids that stand for tokens, and settings of a model's generation by them.

A model may have further rows, as weights are padded; its policy never chooses those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from hypha_ray.model.loading.tokenizer import all_end_tokens

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
        if self.size is None:
            return list(self.gaps)
        return [*self.gaps, *range(self.size, rows)]


EVERY_ROW: Final = Vocabulary()
"""Vocabulary in which each row of a model is a token."""


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a tokenizer; all rows of a model count if the tokenizer doesn't list its tokens."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    if get_vocab is None:
        return EVERY_ROW
    ids = set(get_vocab().values())
    if not ids:
        return EVERY_ROW
    size = max(ids) + 1
    if len(ids) >= size:
        return Vocabulary(size)
    gaps = set(range(size)) - ids
    return Vocabulary(size, tuple(sorted(gaps)))


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
    ends = [end for end in all_end_tokens(network, tokenizer) if end < rows]
    if len(ends) > 1:
        settings.eos_token_id = ends
    else:
        settings.eos_token_id = ends[0] if ends else None
    suppressed = set(settings.suppress_tokens or ())
    if max(suppressed, default=None) == rows - 1:
        suppressed = set()  # They were written by an earlier export, whose tokenizer may have had fewer tokens.
    suppressed.update(vocabulary_of(tokenizer).unknown(rows))
    settings.suppress_tokens = sorted(suppressed) or None
    return ends
