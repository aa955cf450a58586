"""From labelled texts to a prepared dataset for classification, with the classes' names by number.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.encoders import Tokens, dataset_tokenizer
from hypha_ray.data.kinds.kind import Kind, Report, Rows, SliceWriter, no_samples, split, write_split
from hypha_ray.data.manifest import ClassInfo, PreprocessorInfo
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account, amount_text
from hypha_ray.data.slices import Arrays
from hypha_ray.data.sources.judged import Label, LabelledText, labelled_texts
from hypha_ray.errors import ConfigError, DataError, reason_of
from hypha_ray.model.task import IGNORE_INDEX

Labels: TypeAlias = npt.NDArray[np.generic]
"""Labels of one text."""
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
_WORD = "a"
"""Text of the words by which a tokenizer is tested."""


class LabelledSample(NamedTuple):
    """Token ids of a text, their types, and the text's labels."""

    ids: Tokens
    types: Tokens
    labels: Labels


@dataclass(frozen=True, slots=True)
class _TensorForm:
    """Form of the tensors of all samples: their length, the padding token and side, and whether types are in them."""

    length: int
    padding: int
    has_types: bool
    pads_left: bool


def write_texts(options: PrepareOptions, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits with the names of their classes, and the tokenizer beside them.

    Raises:
        DataError: there are no labelled texts, their labels are all the same, or some are of another kind.
        HyphaError: source or tokenizer can't be had.

    """
    class_names: list[str] = []
    texts = list(labelled_texts(options, class_names, account))
    if not texts:
        raise no_samples("labelled texts", options, account, "name another --source, or other columns")
    kind = _common_kind(texts)
    tokenizer = dataset_tokenizer(options, _characters(texts))
    tokenizer.require_fast()
    if options.second_column is not None:
        _require_separator(tokenizer.base, kind, options)
    numbers = list[float]()
    labels = list[Label]()
    for text in texts:
        if isinstance(text.label, float):
            numbers.append(text.label)
        else:
            labels.append(text.label)
    if kind == "number":
        require_different(numbers, options.source)
    else:
        writer.classes = classes_of(labels, class_names, kind == "several", options.source)
    samples = list(_encoded(tokenizer.base, texts, writer.classes, options, report, account))
    splits = split([sample.ids.tobytes() for sample in samples], options, account, "texts")
    form = _TensorForm(
        length=max(len(sample.ids) for sample in samples),
        padding=tokenizer.padding,
        has_types=options.second_column is not None and "token_type_ids" in tokenizer.base.model_input_names,
        # XLNet classifies by the last token, which must not be padding.
        pads_left=samples[0].ids[-1] == tokenizer.base.cls_token_id,
    )

    def load(rows: Rows) -> Arrays:
        return _arrays([samples[row] for row in rows], form)

    write_split(splits, load, options.samples_per_slice, writer)
    writer.tokens = tokenizer.rules([])
    return tokenizer.save(writer.folder)


def _common_kind(texts: Sequence[LabelledText]) -> LabelKind:
    """The kind of all labels.

    Raises:
        DataError: a text has labels of another kind than the first, or words and labels don't match.

    """
    first_kind = _kind(texts[0])
    for text in texts:
        kind = _kind(text)
        if kind != first_kind:
            problem = f"{text.location}: the labels are of another kind than those of {texts[0].location}"
            raise DataError("DATA037", problem, _KINDS[kind], _KINDS[first_kind], "give all rows labels of one kind")
        if isinstance(text.text, list) and isinstance(text.label, list) and len(text.text) != len(text.label):
            problem = f"{text.location}: there isn't one label for each word"
            got = amount_text(len(text.label), "labels")
            raise DataError("DATA037", problem, got, f"{len(text.text)}", "mend or remove the row")
    return first_kind


def _kind(text: LabelledText) -> LabelKind:
    if isinstance(text.text, list):
        if not isinstance(text.label, list):
            raise DataError("DATA037", f"{text.location}: a list of words has a single label", fix=_JOIN)
        return "words"
    if isinstance(text.label, float):
        return "number"
    return "several" if isinstance(text.label, list) else "one"


def _require_separator(tokenizer: Any, kind: LabelKind, options: PrepareOptions) -> None:
    """Refuse second texts that a model couldn't tell from the first ones.

    Raises:
        ConfigError: the tokenizer puts nothing between two texts, or the first ones are lists of words.

    """
    if kind == "words":
        raise ConfigError("PREP007", "--second-column has no effect on lists of words", fix="leave it out")
    if tokenizer.num_special_tokens_to_add(pair=True) <= tokenizer.num_special_tokens_to_add(pair=False):
        problem = f"tokenizer {options.tokenizer!r} puts no token between a text and its second one"
        raise ConfigError("PREP011", problem, fix="choose the tokenizer of an encoder, such as BERT's")


def _characters(texts: Iterable[LabelledText]) -> Iterator[str]:
    """Texts with all characters of the samples, for the vocabulary of ``characters``."""
    for text in texts:
        if isinstance(text.text, str):
            yield text.text
        else:
            yield from text.text
            yield " "
        yield text.second or ""


def _encoded(
    tokenizer: Any,
    texts: Sequence[LabelledText],
    classes: ClassInfo | None,
    options: PrepareOptions,
    report: Report,
    account: Account,
) -> Iterator[LabelledSample]:
    """Tokens and label of each text. Text is taken literally, and the tokenizer adds its special tokens."""
    class_names = () if classes is None else classes.names
    numbers = {name: number for number, name in enumerate(class_names)}
    has_several = classes is not None and classes.several
    cut_texts = 0
    separator = word_separator(tokenizer)
    for start in range(0, len(texts), _AT_ONCE):
        batch = texts[start : start + _AT_ONCE]
        for text, encoding in zip(batch, _encodings(tokenizer, batch, separator, options), strict=True):
            account.leave_out("labels", "of words without tokens", _words_without_tokens(text, encoding))
            cut_tokens = _cut_tokens(tokenizer, text, encoding)
            account.leave_out("tokens", f"behind the first {options.seq_len} of a text, see --seq-len", cut_tokens)
            cut_texts += cut_tokens > 0
            yield LabelledSample(
                ids=np.array(encoding.ids, np.int32),
                types=np.array(encoding.type_ids, np.int32),
                labels=_labels(text, encoding.word_ids, numbers, has_several),
            )
        report("texts", len(batch))
    if cut_texts:
        account.note(f"{amount_text(cut_texts, 'texts')} cut off at --seq-len {options.seq_len}")


def _cut_tokens(tokenizer: Any, text: LabelledText, encoding: Any) -> int:
    """Number of tokens that were cut off."""
    if text.second is None or not encoding.overflowing:
        cut_tokens = 0
        for part in encoding.overflowing:
            cut_tokens += len(part.ids) - sum(part.special_tokens_mask)
        return cut_tokens
    # Overflowing parts of a pair overlap, so they can't be added up.
    whole = tokenizer(text.text, text.second, split_special_tokens=True, verbose=False)
    return len(whole["input_ids"]) - len(encoding.ids)


def _words_without_tokens(text: LabelledText, encoding: Any) -> int:
    """Number of words that have no token, such as empty ones."""
    if isinstance(text.text, str):
        return 0
    words = set[int | None]()
    for part in (encoding, *encoding.overflowing):
        words.update(part.word_ids)
    return len(text.text) - len(words - {None})


def _encodings(tokenizer: Any, batch: Sequence[LabelledText], separator: str, options: PrepareOptions) -> Any:
    inputs: list[str | list[str]] = []
    for text in batch:
        inputs.append(text.text if isinstance(text.text, str) else separated(text.text, separator))
    has_second = batch[0].second is not None
    try:
        return tokenizer(
            inputs,
            [text.second for text in batch] if has_second else None,
            is_split_into_words=isinstance(batch[0].text, list),
            split_special_tokens=True,
            truncation=True,
            max_length=options.seq_len,
            verbose=False,
        ).encodings
    except Exception as error:  # Some tokenizers take no lists of words, or cut nothing off.
        got = reason_of(error)
        problem = f"tokenizer {options.tokenizer!r} doesn't take texts or words of {options.source}"
        raise ConfigError("PREP011", problem, got, fix="choose another --tokenizer") from None


def _labels(text: LabelledText, words: Sequence[int | None], numbers: dict[str, int], has_several: bool) -> Labels:
    """Labels of a text, or of the first token of each word."""
    if isinstance(text.label, float):
        return np.array(text.label, np.float32)
    if has_several or isinstance(text.label, str):
        return numbered(text.label, numbers)
    labels = np.full(len(words), IGNORE_INDEX, np.int32)
    previous = None
    for position, word in enumerate(words):
        if word is not None and word != previous:
            labels[position] = numbers[text.label[word]]
        previous = word
    return labels


def _arrays(samples: Sequence[LabelledSample], form: _TensorForm) -> Arrays:
    """Tensors of some samples, padded on the left or on the right."""
    tokens = np.full((len(samples), form.length), form.padding, np.int32)
    mask = np.zeros_like(tokens)
    types = np.zeros_like(tokens)
    all_labels = []
    for row, (ids, token_types, labels) in enumerate(samples):
        padding = form.length - len(ids)
        start = padding if form.pads_left else 0
        end = start + len(ids)
        tokens[row, start:end] = ids
        mask[row, start:end] = 1
        types[row, start:end] = token_types
        if labels.dtype == np.int32 and labels.ndim:  # Labels of words.
            all_labels.append(np.pad(labels, (start, padding - start), constant_values=IGNORE_INDEX))
        else:
            all_labels.append(labels)
    arrays: Arrays = {"input_ids": tokens, "attention_mask": mask}
    if form.has_types:
        arrays["token_type_ids"] = types
    arrays["labels"] = np.stack(all_labels)
    return arrays


def word_separator(tokenizer: Any) -> str:
    """The text before each word but the first; empty if the tokenizer itself keeps words apart."""
    as_text = _ids(tokenizer, f"{_WORD} {_WORD}")
    if _ids(tokenizer, [_WORD, _WORD]) == as_text:
        return ""
    return " " if _ids(tokenizer, [_WORD, f" {_WORD}"]) == as_text else ""


def separated(words: Sequence[str], separator: str) -> list[str]:
    """Words with the separator before each but the first; an empty word stays empty."""
    following = [word and separator + word for word in words[1:]]
    return [*words[:1], *following]


def _ids(tokenizer: Any, text: str | list[str]) -> list[int]:
    encoded = tokenizer(text, is_split_into_words=isinstance(text, list), add_special_tokens=False)
    ids: list[int] = encoded["input_ids"]
    return ids


KIND: Final = Kind(write_texts, "language", "text and label are")


def classes_of(labels: Iterable[Label], class_names: Sequence[str], has_several: bool, source: str) -> ClassInfo:
    """Classes of a source with their names by number.

    Args:
        labels: label of each sample.
        class_names: names that the source has for its classes; empty without.
        has_several: whether a sample may have several classes.
        source: name of the source, for the error.

    Raises:
        DataError: all samples have the same label, so that there is nothing to learn.

    """
    combinations = set[frozenset[str]]()
    names = set[str]()
    for label in labels:
        combination = frozenset([label] if isinstance(label, str) else label)
        combinations.add(combination)
        names |= combination
    if len(combinations if has_several else names) < 2:
        only_labels = ", ".join(map(repr, sorted(names))) or "none"
        raise _all_equal(source, only_labels, "at least two classes", "add samples of other classes")
    return ClassInfo(tuple(class_names) or _by_number(names), has_several)


def require_different(numbers: Iterable[float], source: str) -> None:
    """Check that numbers to predict aren't all the same.

    Raises:
        DataError: they are, so that there is nothing to learn.

    """
    different = set(numbers)
    if len(different) < 2:
        raise _all_equal(source, f"{different.pop():g}", "different numbers", "name another --label-column")


def _all_equal(source: str, got: str, allowed: str, fix: str) -> DataError:
    return DataError("DATA039", f"all labels in {source} are the same", got, allowed, fix)


def _by_number(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes by number: whole numbers by size, texts by alphabet."""
    ordered = sorted(names)
    if all(name.removeprefix("-").isdecimal() for name in ordered):
        ordered.sort(key=int)
    return tuple(ordered)


def numbered(label: Label, numbers: Mapping[str, int]) -> npt.NDArray[np.generic]:
    """The number of a class, int32 []; for several classes a mark for each class of the dataset, uint8 [C]."""
    if isinstance(label, str):
        return np.array(numbers[label], np.int32)
    return np.array([name in label for name in numbers], np.uint8)
