"""From labelled texts to a prepared dataset for classification.

    a label of each text        ``labels`` int32 [N]
    several labels of a text    ``labels`` uint8 [N, C], 1 for each class that the text has
    a label of each word        ``labels`` int32 [N, L], at the first token of each word, and -100 elsewhere
    a number to predict         ``labels`` float32 [N]

Beside them are ``input_ids`` and ``attention_mask``, int32 [N, L], padded on the right to the longest text. Tokenizers
whose last token classifies, as XLNet's, have padding on the left. Special tokens are those that the tokenizer adds.
With a second text for each one there are ``token_type_ids``, if models of this tokenizer have some. Texts are held in
memory as a whole.

A tokenizer of bytes or characters tells words of a text by the spaces between them, and a list of words has none:

    red blue            red Ġblue        a text
    ["red", "blue"]     red blue         a list: the tokens of "redblue"
    ["red", " blue"]    red Ġblue        the same with spaces
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.manifest import ClassInfo, PreprocessorInfo
from hypha_ray.data.preparation.encoders import (
    Tokens,
    padding_of,
    require_fast,
    save_tokenizer,
    token_rules,
    tokenizer_of,
)
from hypha_ray.data.preparation.kinds.kind import Kind
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import Report, Rows, SliceWriter, split, write_split
from hypha_ray.data.preparation.sources.labelled import (
    LabelledText,
    classes_of,
    labelled_texts,
    numbered,
    require_different,
)
from hypha_ray.data.provenance import Account, counted
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import ConfigError, DataError, reason_of
from hypha_ray.model.tasks.task import IGNORE_INDEX

Labels: TypeAlias = npt.NDArray[np.generic]
"""Labels of one text."""
Sample: TypeAlias = tuple[Tokens, Tokens, Labels]
"""Tokens, their types, and labels."""
LabelKind: TypeAlias = Literal["one", "several", "words", "number"]

_AT_ONCE = 1024
"""Texts that are tokenised at once."""
_KINDS: Final[dict[LabelKind, str]] = {
    "one": "one label",
    "several": "a list of labels",
    "words": "a label for each word",
    "number": "a number",
}
_JOIN = "give each word a label, or join the words to a text"


def write_texts(options: Options, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits with the names of their classes, and the tokenizer beside them.

    Raises:
        DataError: there are no labelled texts, their labels are all the same, or some are of another kind.
        HyphaError: source or tokenizer can't be had.

    """
    names: list[str] = []
    found = list(labelled_texts(options, names, account))
    if not found:
        problem = f"there are no labelled texts in {options.source}"
        fix = "name another --source, or other columns"
        raise DataError("DATA033", problem, account.left_out or "an empty source", fix=fix)
    kind = _common_kind(found)
    tokenizer = tokenizer_of(options, _characters(found))
    require_fast(tokenizer, options.tokenizer)
    if options.second_column is not None:
        _require_separator(tokenizer, kind, options)
    labels = [one.label for one in found]
    if kind == "number":
        require_different((label for label in labels if isinstance(label, float)), options.source)
    else:
        classes = (label for label in labels if not isinstance(label, float))
        writer.classes = classes_of(classes, names, kind == "several", options.source)
    samples = list(_encoded(tokenizer, found, writer.classes, options, report, account))
    splits = split([ids.tobytes() for ids, _, _ in samples], options, account, "texts")
    padding = padding_of(tokenizer, options.tokenizer)
    longest = max(len(ids) for ids, _, _ in samples)
    typed = options.second_column is not None and "token_type_ids" in tokenizer.model_input_names
    left = samples[0][0][-1] == tokenizer.cls_token_id  # XLNet classifies by the last token, which is none of padding.

    def load(rows: Rows) -> Arrays:
        return _arrays([samples[row] for row in rows], longest, padding, typed, left)

    write_split(splits, load, options.samples_per_slice, writer)
    writer.tokens = token_rules(tokenizer, [])
    return save_tokenizer(tokenizer, writer.folder, options.tokenizer, options.tokenizer_revision)


def _common_kind(found: Sequence[LabelledText]) -> LabelKind:
    """The kind of all labels.

    Raises:
        DataError: a text has labels of another kind than the first, or words and labels don't match.

    """
    first = _kind(found[0])
    for one in found:
        if (kind := _kind(one)) != first:
            problem = f"{one.where}: the labels are of another kind than those of {found[0].where}"
            raise DataError("DATA037", problem, _KINDS[kind], _KINDS[first], "give all rows labels of one kind")
        if isinstance(one.text, list) and isinstance(one.label, list) and len(one.text) != len(one.label):
            problem = f"{one.where}: there isn't one label for each word"
            raise DataError(
                "DATA037", problem, f"{len(one.label)} labels", f"{len(one.text)}", "mend or remove the row"
            )
    return first


def _kind(one: LabelledText) -> LabelKind:
    if isinstance(one.text, list):
        if not isinstance(one.label, list):
            raise DataError("DATA037", f"{one.where}: a list of words has a single label", fix=_JOIN)
        return "words"
    if isinstance(one.label, float):
        return "number"
    return "several" if isinstance(one.label, list) else "one"


def _require_separator(tokenizer: Any, kind: LabelKind, options: Options) -> None:
    """Refuse second texts that a model couldn't tell from the first ones.

    Raises:
        ConfigError: the tokenizer puts nothing between two texts, or the first ones are lists of words.

    """
    if kind == "words":
        raise ConfigError("PREP007", "--second-column has no effect on lists of words", fix="leave it out")
    if tokenizer.num_special_tokens_to_add(pair=True) <= tokenizer.num_special_tokens_to_add(pair=False):
        problem = f"tokenizer {options.tokenizer!r} puts no token between a text and its second one"
        raise ConfigError("PREP011", problem, fix="choose the tokenizer of an encoder, such as BERT's")


def _characters(found: Iterable[LabelledText]) -> Iterator[str]:
    for one in found:
        yield from [one.text] if isinstance(one.text, str) else [*one.text, " "]
        yield one.second or ""


def _encoded(
    tokenizer: Any,
    found: Sequence[LabelledText],
    classes: ClassInfo | None,
    options: Options,
    report: Report,
    account: Account,
) -> Iterator[Sample]:
    """Tokens and label of each text. Text is taken literally, and the tokenizer adds its special tokens."""
    numbers = {} if classes is None else {name: number for number, name in enumerate(classes.names)}
    several = classes is not None and classes.several
    cut = 0
    separator = word_separator(tokenizer)
    for start in range(0, len(found), _AT_ONCE):
        part = found[start : start + _AT_ONCE]
        for one, encoding in zip(part, _encodings(tokenizer, part, separator, options), strict=True):
            account.leave_out("labels", "of words without tokens", _tokenless(one, encoding))
            beyond = _beyond(tokenizer, one, encoding)
            account.leave_out("tokens", f"behind the first {options.seq_len} of a text, see --seq-len", beyond)
            cut += beyond > 0
            ids = np.array(encoding.ids, np.int32)
            types = np.array(encoding.type_ids, np.int32)
            yield ids, types, _labels(one, encoding.word_ids, numbers, several)
        report("texts", len(part))
    if cut:
        account.note(f"{counted(cut, 'texts')} cut off at --seq-len {options.seq_len}")


def _beyond(tokenizer: Any, one: LabelledText, encoding: Any) -> int:
    """Number of tokens that were cut off; of a pair, the rests are listed several times."""
    if one.second is None or not encoding.overflowing:
        return sum(len(rest.ids) - sum(rest.special_tokens_mask) for rest in encoding.overflowing)
    whole = tokenizer(one.text, one.second, split_special_tokens=True, verbose=False)
    return len(whole["input_ids"]) - len(encoding.ids)


def _tokenless(one: LabelledText, encoding: Any) -> int:
    """Number of words that have no token, such as empty ones."""
    if isinstance(one.text, str):
        return 0
    words = {word for part in (encoding, *encoding.overflowing) for word in part.word_ids}
    return len(one.text) - len(words - {None})


def _encodings(tokenizer: Any, part: Sequence[LabelledText], separator: str, options: Options) -> Any:
    try:
        return tokenizer(
            [one.text if isinstance(one.text, str) else separated(one.text, separator) for one in part],
            None if part[0].second is None else [one.second for one in part],
            is_split_into_words=isinstance(part[0].text, list),
            split_special_tokens=True,
            truncation=True,
            max_length=options.seq_len,
            verbose=False,
        ).encodings
    except Exception as error:  # Some tokenizers take no lists of words, or cut nothing off.
        got = reason_of(error)
        problem = f"tokenizer {options.tokenizer!r} doesn't take texts or words of {options.source}"
        raise ConfigError("PREP011", problem, got, fix="choose another --tokenizer") from None


def _labels(one: LabelledText, words: Sequence[int | None], numbers: dict[str, int], several: bool) -> Labels:
    """Labels of a text, or of the first token of each word."""
    if isinstance(one.label, float):
        return np.array(one.label, np.float32)
    if several or isinstance(one.label, str):
        return numbered(one.label, numbers)
    found = np.full(len(words), IGNORE_INDEX, np.int32)
    before = None
    for place, word in enumerate(words):
        if word is not None and word != before:
            found[place] = numbers[one.label[word]]
        before = word
    return found


def _arrays(samples: Sequence[Sample], length: int, padding: int, typed: bool, left: bool) -> Arrays:
    """Tensors of some samples, padded on the left or on the right; types of tokens if they are wanted."""
    tokens = np.full((len(samples), length), padding, np.int32)
    mask = np.zeros_like(tokens)
    types = np.zeros_like(tokens)
    labels = []
    for place, (ids, kinds, label) in enumerate(samples):
        lacks = length - len(ids)
        part, ends = (slice(lacks, length), (lacks, 0)) if left else (slice(0, len(ids)), (0, lacks))
        tokens[place, part], mask[place, part], types[place, part] = ids, 1, kinds
        of_words = label.dtype == np.int32 and label.ndim
        labels.append(np.pad(label, ends, constant_values=IGNORE_INDEX) if of_words else label)
    second = {"token_type_ids": types} if typed else {}
    return {"input_ids": tokens, "attention_mask": mask, **second, "labels": np.stack(labels)}


KIND: Final = Kind(write_texts, "language", "text and label are")


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
