"""Settings of a model's generation by transformers: where answers end, and ids that stand for no token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypha_ray.model.loading.token_rules import named_ends
from hypha_ray.model.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
