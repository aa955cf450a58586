"""Lists of words for tokenizers: words stay apart, as in the text that they are of.

A tokenizer of bytes or characters tells words of a text by the spaces between them, and a list of words has none:

    red blue            red Ġblue        a text
    ["red", "blue"]     red blue         a list: the tokens of "redblue"
    ["red", " blue"]    red Ġblue        the same with spaces
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WORD = "a"


def word_separator(tokenizer: Any) -> str:
    """The text before each word but the first; empty if the tokenizer itself keeps words apart."""
    as_text = _ids(tokenizer, f"{_WORD} {_WORD}")
    if _ids(tokenizer, [_WORD, _WORD]) == as_text:
        return ""
    return " " if _ids(tokenizer, [_WORD, f" {_WORD}"]) == as_text else ""


def separated(words: Sequence[str], separator: str) -> list[str]:
    """Words with the separator before each but the first; an empty word stays empty."""
    behind = [word and separator + word for word in words[1:]]
    return [*words[:1], *behind]


def _ids(tokenizer: Any, text: str | list[str]) -> list[int]:
    found: list[int] = tokenizer(text, is_split_into_words=isinstance(text, list), add_special_tokens=False)[
        "input_ids"
    ]
    return found
