"""Tokens that end a response."""

from __future__ import annotations

from typing import Any

from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.token_rules import named_ends
from hypha_ray.model.vocabulary import vocabulary_of


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response, as far as the model can sample them.

    They are the tokenizer's end token, those of the model's generation settings, and those that answers ended in when
    the data was prepared.

    Raises:
        ConfigError: RL004, there is none.

    """
    rows = model.config.get_text_config().vocab_size
    vocabulary = vocabulary_of(tokenizer)
    found = frozenset(one for one in named_ends(model, tokenizer) if one < rows and one in vocabulary)
    if not found:
        fix = "name a tokenizer with an end token in preprocessor.repository, or set eos_token_id in [model.config]"
        raise ConfigError("RL004", "neither tokenizer nor model has a token that ends a response", fix=fix)
    return found
