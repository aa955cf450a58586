"""Tokens of texts with scored parts, each part tokenised apart from what stands before it.

In generation a model gets the tokens of a prompt alone. One tokenization of a prompt and its answer may differ there:

    one text        Q : Ġ1 + 1 = Ġ2       the space is a part of the answer's token
    prompt alone    Q : Ġ1 + 1 = Ġ        the space is a token of its own
    as trained      Q : Ġ1 + 1 = Ġ 2      so the answer begins behind it

If the tokens of the prompt alone begin those of the whole text, these are taken as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hypha_ray.data.preparation.encoders import Tokens


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text, and its parts that are scored, each with its first character and the character behind its last.

    `openings` are the places behind generation prompts; None: scored parts begin there.
    """

    text: str
    parts: tuple[tuple[int, int], ...]
    openings: tuple[int, ...] | None = None

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The text cut where generation begins: first character of each segment, and the one behind its last."""
        openings = [start for start, _ in self.parts] if self.openings is None else self.openings
        cuts = sorted({place for place in openings if 0 < place < len(self.text)})
        return list(pairwise([0, *cuts, len(self.text)]))


class ScoredTokens(NamedTuple):
    """Token ids, and which of them are scored."""

    ids: Tokens
    scored: npt.NDArray[np.bool_]


class _Encoding(NamedTuple):
    """Ids of a text, and the first character of each token with the one behind its last."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def moved(self, characters: int) -> _Encoding:
        """The encoding with later offsets."""
        return _Encoding(self.ids, [(start + characters, end + characters) for start, end in self.offsets])

    def followed(self, other: _Encoding) -> _Encoding:
        """The encoding with another one behind it."""
        return _Encoding(self.ids + other.ids, self.offsets + other.offsets)


class TextTokenizer:
    """Tokenises texts with scored parts; `joined` counts those of which one tokenization would have been another.

    Args:
        tokenizer: a fast tokenizer, which tells the characters of a token.
        literal: special tokens in a text are taken as plain text.

    """

    def __init__(self, tokenizer: Any, literal: bool) -> None:
        self.joined = 0
        self._tokenizer = tokenizer
        self._literal = literal
        added = tokenizer.added_tokens_decoder.items()
        self._added = {number for number, token in added if not (literal and token.special)}
        self._without_prefix = _without_prefix(tokenizer, literal)

    def tokenized(self, texts: Sequence[ScoredText]) -> list[ScoredTokens]:
        """Tokens of texts; those with a character of a scored part are scored."""
        wholes = self._encoded([one.text for one in texts])
        segments = [[one.text[start:end] for start, end in one.segments] for one in texts]
        firsts = self._encoded([parts[0] for parts in segments])
        found = []
        for text, parts, whole, first in zip(texts, segments, wholes, firsts, strict=True):
            ids = [*first.ids]
            for part in parts[1:]:
                ids += self._continued(part).ids
            encoding = whole if ids == whole.ids else self._apart(text, first)
            self.joined += encoding.ids != whole.ids
            found.append(ScoredTokens(np.array(encoding.ids, np.int32), _scored(text, encoding.offsets)))
        return found

    def _apart(self, text: ScoredText, first: _Encoding) -> _Encoding:
        """Tokens of each segment behind those of the text before it."""
        encoding = first
        for start, end in text.segments[1:]:
            longer = self._encoded([text.text[:end]])[0]
            if longer.ids[: len(encoding.ids)] == encoding.ids:
                encoding = longer
            else:
                encoding = encoding.followed(self._continued(text.text[start:end]).moved(start))
        return encoding

    def _continued(self, text: str) -> _Encoding:
        """Tokens of a text that goes on from another one, without a space that the tokenizer puts before texts."""
        whole = self._encoded([text])[0]
        if self._without_prefix is None:
            return whole
        starts = (start for number, (start, _) in zip(whole.ids, whole.offsets, strict=True) if number in self._added)
        cut = next(starts, len(text))  # Behind a special token, the tokenizer does as it always does.
        bare = self._without_prefix.encode(text[:cut], add_special_tokens=False)
        head = _Encoding(bare.ids, bare.offsets)
        return head if cut == len(text) else head.followed(self._encoded([text[cut:]])[0].moved(cut))

    def _encoded(self, texts: list[str]) -> list[_Encoding]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=self._literal,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [_Encoding(*one) for one in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)]


def _scored(text: ScoredText, offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    edges = np.array(offsets, np.int64).reshape(-1, 2)
    found = np.zeros(len(edges), np.bool_)
    for start, end in text.parts:
        found |= (edges[:, 0] < end) & (edges[:, 1] > start)
    return found


def _without_prefix(tokenizer: Any, literal: bool) -> Any:
    """The tokenizer's core without the space that it puts before texts; None if it puts none."""
    from tokenizers import Tokenizer

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    changed = copy.deepcopy(described)
    for step in _steps(changed["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
    changed["normalizer"] = _unpadded(changed["normalizer"])
    if changed == described:
        return None
    found = Tokenizer.from_str(json.dumps(changed))
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = literal
    return found


def _steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A step of a tokenizer, or the steps of a sequence."""
    if step is None:
        return []
    return [one for part in step[inner] for one in _steps(part, inner)] if step["type"] == "Sequence" else [step]


def _unpadded(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer that neither puts anything before a text nor takes spaces from its beginning."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        parts = [_unpadded(part) for part in step["normalizers"]]
        return step | {"normalizers": [part for part in parts if part is not None]}
    return step | {"strip_left": False} if step["type"] == "Strip" else step
