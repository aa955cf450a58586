"""Tokenizers of bytes and of characters, which need no download."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

_SPECIALS = ("<pad>", "</s>", "<unk>")
_SPARE = 125
"""Number of ByT5's tokens that occur in no text."""


def byte_tokenizer(spare: int = _SPARE) -> Any:
    """ByT5's vocabulary as a fast tokenizer: pad, end and unknown, the bytes, and spare tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_numbered(_byte_names()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast_tokenizer(tokenizer, [f"<extra_id_{number}>" for number in range(spare)])


def as_fast(tokenizer: Any) -> Any:
    """A fast tokenizer with the ids and the end of a ByT5 tokenizer, which is written in Python; any other as it is."""
    from tokenizers.processors import TemplateProcessing
    from transformers import ByT5Tokenizer

    if not isinstance(tokenizer, ByT5Tokenizer):
        return tokenizer
    spare = len(tokenizer) - len(_SPECIALS) - 256
    fast = byte_tokenizer(max(0, spare))
    fast_specials = fast.get_vocab().keys() - set(_byte_names())
    specials = tokenizer.get_vocab().keys() - set(map(chr, range(256)))
    if fast_specials != specials:
        return tokenizer  # Its special tokens have other names.
    end = _SPECIALS[1]
    end_id = fast.convert_tokens_to_ids(end)
    fast.backend_tokenizer.post_processor = TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B:1", f"{end}:1"], special_tokens=[(end, end_id)]
    )
    fast.chat_template = tokenizer.chat_template
    return fast


def character_tokenizer(texts: Iterable[str]) -> Any:
    """Tokenizer with one token per character of the texts: pad, end and unknown, then the characters by code point.

    With so small a vocabulary, a tiny model finds rewards by chance; with a vocabulary of all bytes it doesn't.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = set[str]()
    for text in texts:
        characters.update(text)
    tokenizer = Tokenizer(models.WordLevel(vocab=_numbered(sorted(characters)), unk_token=_SPECIALS[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _fast_tokenizer(tokenizer)


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate([*_SPECIALS, *tokens])}


def _fast_tokenizer(tokenizer: Any, spare: Sequence[str] = ()) -> Any:
    """A tokenizer of transformers around one of the library tokenizers."""
    from transformers import PreTrainedTokenizerFast

    pad, end, unknown = _SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        unk_token=unknown,
        additional_special_tokens=list(spare),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _byte_names() -> list[str]:
    """GPT-2's character for each byte: the byte itself if it is printable, otherwise one after the first 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unused = itertools.count(0x100)
    return [chr(byte if byte in printable else next(unused)) for byte in range(0x100)]
