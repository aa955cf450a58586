"""Tokens of texts with scored parts, each part tokenised apart from the text before it.

In generation a model gets the tokens of a prompt alone. One tokenization of a prompt and its answer may differ there:

    one text        Q : Ġ1 + 1 = Ġ2       the space is a part of the answer's token
    prompt alone    Q : Ġ1 + 1 = Ġ        the space is a token of its own
    as trained      Q : Ġ1 + 1 = Ġ 2      so the answer begins behind it

If the tokens of the whole text begin with the tokens of the prompt alone, they are taken as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hypha_ray.data.encoders import Tokens


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text, and its parts that are scored, each with its first character and the character behind its last.

    `openings` are the characters behind generation prompts; None: generation begins with the scored parts.
    """

    text: str
    parts: tuple[tuple[int, int], ...]
    openings: tuple[int, ...] | None = None

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The text cut where generation begins: first character of each segment, and the one behind its last."""
        openings = self.openings
        if openings is None:
            openings = tuple(start for start, _ in self.parts)
        length = len(self.text)
        cuts = {opening for opening in openings if 0 < opening < length}
        return list(pairwise([0, *sorted(cuts), length]))


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
        offsets = [(start + characters, end + characters) for start, end in self.offsets]
        return _Encoding(self.ids, offsets)

    def followed(self, continuation: _Encoding) -> _Encoding:
        """The encoding with another one behind it."""
        return _Encoding(self.ids + continuation.ids, self.offsets + continuation.offsets)


class TextTokenizer:
    """Tokenises texts with scored parts.

    `joined` counts the texts that would have had other tokens if they had been tokenised as a whole.

    Args:
        tokenizer: a fast tokenizer, which has the characters of each token.
        literal: special tokens in a text are taken as plain text.

    """

    def __init__(self, tokenizer: Any, literal: bool) -> None:
        self.joined = 0
        self._tokenizer = tokenizer
        self._literal = literal
        self._added_ids = set[int]()
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if not (literal and token.special):
                self._added_ids.add(token_id)
        self._core = _without_prefix(tokenizer, literal)
        """The tokenizer's core without the space that it puts before texts; None if it puts none."""

    def tokenized(self, texts: Sequence[ScoredText]) -> list[ScoredTokens]:
        """Tokens of texts; those with a character of a scored part are scored."""
        whole_encodings = self._encoded([scored.text for scored in texts])
        first_encodings = self._encoded([scored.text[: scored.segments[0][1]] for scored in texts])
        samples = []
        for scored, whole_encoding, first_encoding in zip(texts, whole_encodings, first_encodings, strict=True):
            ids = [*first_encoding.ids]
            for start, end in scored.segments[1:]:
                ids += self._continued(scored.text[start:end]).ids
            encoding = whole_encoding if ids == whole_encoding.ids else self._by_segments(scored, first_encoding)
            self.joined += encoding.ids != whole_encoding.ids
            samples.append(ScoredTokens(np.array(encoding.ids, np.int32), _scored(scored, encoding.offsets)))
        return samples

    def _by_segments(self, text: ScoredText, first_encoding: _Encoding) -> _Encoding:
        """Tokens of each segment behind those of the text before it."""
        encoding = first_encoding
        for start, end in text.segments[1:]:
            longer = self._encoded([text.text[:end]])[0]
            if longer.ids[: len(encoding.ids)] == encoding.ids:
                encoding = longer
            else:
                segment = self._continued(text.text[start:end])
                encoding = encoding.followed(segment.moved(start))
        return encoding

    def _continued(self, text: str) -> _Encoding:
        """Tokens of a text that goes on from another one, without a space that the tokenizer puts before texts."""
        whole_encoding = self._encoded([text])[0]
        if self._core is None:
            return whole_encoding
        cut_index = len(text)
        for token_id, (start, _) in zip(whole_encoding.ids, whole_encoding.offsets, strict=True):
            if token_id in self._added_ids:
                cut_index = start
                break
        bare = self._core.encode(text[:cut_index], add_special_tokens=False)
        head = _Encoding(bare.ids, bare.offsets)
        if cut_index == len(text):
            return head
        # Behind a special token, the tokenizer puts its space as always.
        tail_encoding = self._encoded([text[cut_index:]])[0]
        return head.followed(tail_encoding.moved(cut_index))

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
        return list(map(_Encoding, encoded["input_ids"], encoded["offset_mapping"]))


def _scored(text: ScoredText, offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Flags of tokens with a character of a scored part, if generation doesn't begin behind them.

    A special token may take in the spaces behind it, as some of Phi's do, and with them the beginning of an answer.
    """
    edges = np.array(offsets, np.int64).reshape(-1, 2)
    scored = np.zeros(len(edges), np.bool_)
    for start, end in text.parts:
        scored |= (edges[:, 0] < end) & (edges[:, 1] > start)
    for start, _ in text.segments[1:]:
        scored &= (edges[:, 0] >= start) | (edges[:, 1] <= start)
    return scored


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
    core = Tokenizer.from_str(json.dumps(changed))
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = literal
    return core


def _steps(step: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """A step of a tokenizer, or the steps of a sequence."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[inner]:
        yield from _steps(part, inner)


def _unpadded(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer that neither puts anything before a text nor takes spaces from its beginning."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Strip":
        return step | {"strip_left": False}
    if step["type"] != "Sequence":
        return step
    parts = []
    for inner in step["normalizers"]:
        part = _unpadded(inner)
        if part is not None:
            parts.append(part)
    return step | {"normalizers": parts}
