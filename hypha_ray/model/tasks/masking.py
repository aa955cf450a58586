"""Masking of tokens for masked language models.

Masked tokens depend on the seed and the sample's key alone, not on the batch or the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

SampleKeys: TypeAlias = npt.NDArray[np.int64]
"""Keys of a batch's samples, int64 [N, 3]: epoch, slice, and index in the slice's file."""

MASKED_FRACTION = 0.15
"""Fraction of tokens that is masked (BERT, arXiv 1810.04805, §3.1)."""
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id")


@dataclass(frozen=True, slots=True)
class Masking:
    """Vocabulary, as far as masking needs it."""

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...] = ()
    """Tokens that are never masked, such as separators."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens of a tokenizer under transformers' names: all that workers need of it."""

    mask_token_id: int | None
    all_special_ids: tuple[int, ...]


def masking_of(config: Any, preprocessor: Any | None) -> Masking | None:
    """Return mask token and special tokens of a tokenizer, otherwise of a model's configuration.

    Args:
        config: configuration of the model, whose vocabulary counts.
        preprocessor: tokenizer, processor with a tokenizer, `SpecialTokens`, or None.

    Returns:
        None if neither has a mask token.

    Raises:
        ConfigError: the mask token is outside of the model's vocabulary.

    """
    text = config.get_text_config()
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    mask_id = getattr(tokenizer, "mask_token_id", None)
    special = tuple(getattr(tokenizer, "all_special_ids", ()))
    if mask_id is None:
        mask_id = getattr(text, "mask_token_id", None)
        special = tuple(sorted({mask_id, *_ids(text)} - {None})) if mask_id is not None else ()
    if mask_id is None:
        return None
    if not 0 <= mask_id < text.vocab_size:
        raise ConfigError(
            "MODEL007",
            "the mask token isn't in the model's vocabulary",
            f"token {mask_id}",
            f"0 … {text.vocab_size - 1}",
            "use the model's own tokenizer, or give the model a larger vocab_size",
        )
    return Masking(mask_id, text.vocab_size, special)


def missing_mask_token(name: str) -> ConfigError:
    """Return the error for a masked language model without a mask token."""
    return ConfigError(
        "MODEL007",
        f"{name} needs a mask token, and neither tokenizer nor model configuration has one",
        fix="name a tokenizer with a mask token in preprocessor.repository, or set mask_token_id in model.config",
    )


def mask_tokens(
    tokens: npt.NDArray[np.integer[Any]], fixed: npt.NDArray[np.bool_], masking: Masking, keys: SampleKeys, seed: int
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.bool_]]:
    """Mask tokens as BERT does: 80 % of the chosen become the mask, 10 % a random token, 10 % stay.

    A sample has at least one chosen token, unless all of its tokens are fixed.

    Args:
        tokens: token ids, [N, T].
        fixed: tokens that may not be chosen, [N, T].
        masking: vocabulary.
        keys: keys of the samples, [N, 3].
        seed: seed of the choice.

    Returns:
        Ids after masking, and a mask of the chosen tokens.

    """
    draws = np.stack([np.random.default_rng([seed, *key]).random((3, *tokens.shape[1:])) for key in keys.tolist()])
    score = np.where(fixed, 2.0, draws[:, 0])
    least = score.reshape(len(score), -1).min(axis=1).reshape(-1, *[1] * (score.ndim - 1))
    chosen = (score <= np.maximum(least, MASKED_FRACTION)) & ~fixed
    random_ids = (draws[:, 2] * masking.vocab_size).astype(tokens.dtype)
    changed = np.where(draws[:, 1] < 0.8, tokens.dtype.type(masking.mask_id), random_ids)
    return np.where(chosen & (draws[:, 1] < 0.9), changed, tokens), chosen


def _ids(config: Any) -> Iterable[int]:
    """Return the special tokens in a configuration, which may be several for one purpose."""
    for name in _SPECIAL:
        value = getattr(config, name, None)
        yield from [value] if isinstance(value, int) else value or ()
