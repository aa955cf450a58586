"""Tokens that end a response."""

from __future__ import annotations

from typing import Any

from hypha_ray.errors import ConfigError


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens of a tokenizer and of a model's generation settings, as far as the model can sample them.

    Raises:
        ConfigError: RL004, there is none.

    """
    settings = getattr(model, "generation_config", None)
    given = (getattr(tokenizer, "eos_token_id", None), getattr(settings, "eos_token_id", None))
    named = [one for ids in given if ids is not None for one in (ids if isinstance(ids, list) else [ids])]
    found = frozenset(one for one in named if one < model.config.get_text_config().vocab_size)
    if not found:
        fix = "name a tokenizer with an end token in preprocessor.repository, or set eos_token_id in [model.config]"
        raise ConfigError("RL004", "neither tokenizer nor model has a token that ends a response", fix=fix)
    return found
