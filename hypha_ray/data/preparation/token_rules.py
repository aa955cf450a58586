"""Decisions of a preparation about tokens, for the manifest: begin, ends, vocabulary, and chat template."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hypha_ray.data.manifest import TokenRules

_TEXT = "a"
"""Text whose tokens are looked for among those that a tokenizer puts around them."""


def token_rules(tokenizer: Any, ends: Iterable[int], *, templated: bool = False) -> TokenRules:
    """Rules of samples that a tokenizer has made.

    Args:
        tokenizer: the tokenizer.
        ends: ids that end texts and answers.
        templated: whether samples have gone through its chat template.

    """
    digest = hashlib.sha256(_template(tokenizer).encode()).hexdigest() if templated else None
    return TokenRules(begin_of(tokenizer), tuple(ends), vocabulary_size(tokenizer), digest)


def begin_of(tokenizer: Any) -> tuple[int, ...]:
    """The ids that a tokenizer puts before a text, such as ``<s>``; empty if there are none."""
    body: list[int] = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer(_TEXT)["input_ids"]
    places = (place for place in range(len(whole)) if whole[place : place + len(body)] == body)
    return tuple(whole[: next(places, 0)])


def vocabulary_size(tokenizer: Any) -> int:
    """One more than a tokenizer's largest id, and the number of its tokens at least."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def ends_among(tokenizer: Any, last: Sequence[int]) -> tuple[int, ...]:
    """The ends among the last tokens of answers, the most frequent first.

    An end is a special token, but not the one for unknown text. A token that was added to a vocabulary without being
    called special is an end if it ends most answers.
    """
    added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
    special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
    counts = Counter(number for number in last if number != tokenizer.unk_token_id).most_common()
    return tuple(end for end, count in counts if end in special or (end in added and 2 * count > len(last)))


def _template(tokenizer: Any) -> str:
    """Text of the chat template that is taken for chats without tools."""
    return str(tokenizer.get_chat_template(None, None))
