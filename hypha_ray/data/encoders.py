"""Text to token ids: bytes and characters, which need no download, or any Hugging Face tokenizer; and token rules."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.manifest import PreprocessorInfo, TokenRules
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import readable
from hypha_ray.errors import ConfigError, DataError, reason_of
from hypha_ray.model.sources import fetch
from hypha_ray.model.tokenizers import save_flat

_SPECIALS = ("<pad>", "</s>", "<unk>")
_SPARE = 125
"""Number of ByT5's tokens that occur in no text."""
Tokens: TypeAlias = npt.NDArray[np.int32]

PLAIN = ("byte", "characters")
"""Tokenizers of our own, which need no files."""

FOLDER = "tokenizer"
"""Name of the tokenizer's folder beside the slices; the tokenizer is exported with the trained model."""

PREPROCESSOR = "preprocessor"
"""Name of the folder of an image processor or feature extractor; it is exported as well."""
_TEXT = "a"
"""Text whose tokens are looked for among those that a tokenizer puts around them."""


def byte_tokenizer(spare_tokens: int = _SPARE) -> Any:
    """ByT5's vocabulary as a fast tokenizer: pad, end and unknown, the bytes, and spare tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_numbered(_byte_names()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast_tokenizer(tokenizer, [f"<extra_id_{number}>" for number in range(spare_tokens)])


def as_fast(tokenizer: Any) -> Any:
    """A fast tokenizer with the ids and the end of a ByT5 tokenizer, which is written in Python; others unchanged."""
    from tokenizers.processors import TemplateProcessing
    from transformers import ByT5Tokenizer

    if not isinstance(tokenizer, ByT5Tokenizer):
        return tokenizer
    spare_tokens = len(tokenizer) - len(_SPECIALS) - 256
    fast_tokenizer = byte_tokenizer(max(0, spare_tokens))
    fast_specials = fast_tokenizer.get_vocab().keys() - set(_byte_names())
    specials = tokenizer.get_vocab().keys() - set(map(chr, range(256)))
    if fast_specials != specials:
        return tokenizer  # The special tokens have other names.
    end = _SPECIALS[1]
    end_id = fast_tokenizer.convert_tokens_to_ids(end)
    fast_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B:1", f"{end}:1"], special_tokens=[(end, end_id)]
    )
    fast_tokenizer.chat_template = tokenizer.chat_template
    return fast_tokenizer


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
    return {token: token_id for token_id, token in enumerate([*_SPECIALS, *tokens])}


def _fast_tokenizer(tokenizer: Any, spare_names: Sequence[str] = ()) -> Any:
    """A tokenizer of transformers around one of the library tokenizers."""
    from transformers import PreTrainedTokenizerFast

    pad_token, end_token, unknown_token = _SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad_token,
        eos_token=end_token,
        unk_token=unknown_token,
        additional_special_tokens=list(spare_names),
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _byte_names() -> list[str]:
    """GPT-2's character for each byte: the byte itself if it is printable, otherwise one after the first 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unused = itertools.count(0x100)
    return [chr(byte if byte in printable else next(unused)) for byte in range(0x100)]


class DocumentEncoder(Protocol):
    """Encodes documents as one sequence of token ids, each between the tokens that begin and end a text."""

    def encode(self, documents: Sequence[str]) -> Tokens:
        """Token ids of all documents in one row. Text is taken literally: ``</s>`` in a document is four characters."""
        ...

    def save(self, folder: Path) -> PreprocessorInfo:
        """Save the tokenizer below `folder` and return its description."""
        ...

    @property
    def rules(self) -> TokenRules:
        """The tokens that begin and end documents."""
        ...

    @property
    def advice(self) -> str:
        """Advice for users of the saved tokenizer; empty if there is none."""
        ...


class ByteEncoder:
    """ByT5's bytes (arXiv 2105.13626): id = byte + 3, end = 1. The ids equal those of transformers' ByT5Tokenizer.

    That tokenizer takes a Python step for every byte; this encoder takes none.
    """

    OFFSET = 3
    END = 1

    def encode(self, documents: Sequence[str]) -> Tokens:
        """Ids of all documents in one row."""
        # The byte 0xFF never occurs in UTF-8, so it can mark a document's end.
        data = b"".join(document.encode() + b"\xff" for document in documents)
        values = np.frombuffer(data, dtype=np.uint8)
        ids = values.astype(np.int32) + self.OFFSET
        ids[values == 0xFF] = self.END
        return ids

    def save(self, folder: Path) -> PreprocessorInfo:
        """Save the encoder as a tokenizer that `AutoTokenizer` loads.

        ByT5's own tokenizer appends an end token to every text, so a model couldn't continue a prompt. The saved
        tokenizer has the same ids and appends none.
        """
        return save_tokenizer(byte_tokenizer(), folder, "byte")

    @property
    def rules(self) -> TokenRules:
        """No begin, and one end."""
        return TokenRules((), (self.END,), vocabulary_size(byte_tokenizer()))

    @property
    def advice(self) -> str:
        """Empty: the saved tokenizer leaves prompts open."""
        return ""


class TokenizerEncoder:
    """A tokenizer of transformers.

    Args:
        tokenizer: a tokenizer with an end token.
        name: its name for the manifest.
        revision: its revision on the hub; None: the default branch, or a local tokenizer.

    Raises:
        ConfigError: the tokenizer has no token for the end of a document.

    """

    def __init__(self, tokenizer: Any, name: str, revision: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._revision = revision
        self._begin = begin_of(tokenizer)
        self._end = require_end(tokenizer, name)

    def encode(self, documents: Sequence[str]) -> Tokens:
        """Ids of all documents in one row."""
        encoded = self._tokenizer(
            list(documents),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # Documents may be longer than the model's context, since they are cut into sequences.
        )
        framed: list[int] = []
        for ids in encoded["input_ids"]:
            framed += self._begin
            framed += ids
            framed.append(self._end)
        return np.array(framed, dtype=np.int32)

    def save(self, folder: Path) -> PreprocessorInfo:
        """Save the tokenizer beside the slices."""
        return save_tokenizer(self._tokenizer, folder, self._name, self._revision)

    @property
    def rules(self) -> TokenRules:
        """The begin that the tokenizer puts before a text, and its end token."""
        return TokenRules(self._begin, (self._end,), vocabulary_size(self._tokenizer))

    @property
    def advice(self) -> str:
        """Advice for prompts if the tokenizer appends an end token, after which a model can't continue a text."""
        ids = self._tokenizer("a")["input_ids"]
        if ids[-1:] != [self._end]:
            return ""
        return f"tokenizer {self._name!r} ends every text: give prompts with add_special_tokens=False"


def require_end(tokenizer: Any, name: str) -> int:
    """The token for the end of a document.

    Raises:
        ConfigError: the tokenizer has none.

    """
    end = tokenizer.eos_token_id
    if end is None:
        end = tokenizer.sep_token_id
    if end is None:
        fix = "give it an eos_token and save it, or choose another"
        raise ConfigError("PREP002", f"tokenizer {name!r} has no token for the end of a document", fix=fix)
    return int(end)


def save_preprocessor(preprocessor: Any, folder: Path) -> None:
    """Save a tokenizer, an image processor or a feature extractor as a new folder.

    The folder is made elsewhere first: the library that writes it accepts only names in UTF-8.
    """
    with tempfile.TemporaryDirectory() as scratch:
        new_folder = Path(scratch) / "new"  # Unlike the scratch folder, it has the usual permissions.
        save_flat(preprocessor, new_folder)
        shutil.copytree(new_folder, folder)


def save_tokenizer(tokenizer: Any, folder: Path, name: str, revision: str | None = None) -> PreprocessorInfo:
    """Save a tokenizer in a dataset's folder."""
    save_preprocessor(tokenizer, folder / FOLDER)
    return PreprocessorInfo(name, revision, FOLDER, len(tokenizer))


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer of a hub name or local folder.

    Raises:
        HyphaError: it can't be loaded.

    """
    folder = fetch(name, revision, token=None)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # Tokenizers raise anything from KeyError to the exceptions of their Rust code.
        got = reason_of(error)
        fix = "name a tokenizer on the hub, a folder that has one, 'byte' or 'characters'"
        raise ConfigError("PREP006", f"tokenizer {name!r} can't be loaded", got, fix=fix) from error


@dataclass(frozen=True, slots=True)
class DatasetTokenizer:
    """The tokenizer of the samples of a dataset."""

    base: Any
    """The tokenizer of transformers."""
    name: str
    """Name on the hub, folder, ``byte`` or ``characters``."""
    revision: str | None
    """Revision on the hub; None: the default branch, or a local tokenizer."""
    begin: tuple[int, ...]
    """Ids that it puts before a text, such as ``<s>``; empty if there are none."""
    end: int
    """Token for the end of a text."""
    padding: int
    """Token for padding: its own, otherwise the end."""
    is_templated: bool
    """Whether samples go through its chat template."""
    system: str | None
    """System message that is put before chats without one; None: none."""

    def require_fast(self) -> None:
        """Refuse a tokenizer that doesn't know the characters and words of a token.

        Raises:
            ConfigError: it is written in Python.

        """
        if not self.base.is_fast:
            fix = "choose one with a tokenizer.json, or byte for ByT5's"
            raise ConfigError("PREP010", f"tokenizer {self.name!r} doesn't tell the characters of a token", fix=fix)

    def rules(self, ends: Iterable[int]) -> TokenRules:
        """Rules of samples with these tokens at the ends of texts and answers."""
        template_sha256 = None
        if self.is_templated:
            template = str(self.base.get_chat_template(None, None))  # It is taken for chats without tools.
            template_sha256 = hashlib.sha256(template.encode()).hexdigest()
        size = vocabulary_size(self.base)
        return TokenRules(self.begin, tuple(ends), size, template_sha256, self.system)

    def save(self, folder: Path) -> PreprocessorInfo:
        """Save the tokenizer below the folder of the dataset."""
        return save_tokenizer(self.base, folder, self.name, self.revision)


def dataset_tokenizer(options: PrepareOptions, texts: Iterable[str]) -> DatasetTokenizer:
    """The tokenizer that the options name, with an end token, and with a chat template if the options need one.

    Args:
        options: the tokenizer, its revision, and the file of a chat template.
        texts: texts with all characters of the samples, for the vocabulary of ``characters``.

    Raises:
        DataError: there is no chat template.
        HyphaError: tokenizer or template can't be loaded or used.

    """
    template = None if options.chat_template is None else read_template(options.chat_template)
    if options.tokenizer == "byte":
        tokenizer = byte_tokenizer()
    elif options.tokenizer == "characters":
        tokenizer = character_tokenizer(itertools.chain(texts, [template or ""]))
    else:
        tokenizer = as_fast(load_tokenizer(options.tokenizer, options.tokenizer_revision))
    end = require_end(tokenizer, options.tokenizer)
    if template is not None:
        tokenizer.chat_template = template
    if options.is_templated and not tokenizer.chat_template:
        fix = "name the tokenizer of a model that is made for chats, or give a template by --chat-template FILE"
        raise DataError("DATA034", f"tokenizer {options.tokenizer!r} has no chat template", fix=fix)
    if options.is_templated:
        _require_default_template(tokenizer, options.tokenizer)
    padding = end if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    return DatasetTokenizer(
        base=tokenizer,
        name=options.tokenizer,
        revision=options.tokenizer_revision,
        begin=begin_of(tokenizer),
        end=end,
        padding=padding,
        is_templated=options.is_templated,
        system=options.system,
    )


def _require_default_template(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer whose chat templates have names, none of which is the default's.

    Raises:
        DataError: DATA034.

    """
    try:
        tokenizer.get_chat_template(None, None)
    except ValueError:
        names = ", ".join(sorted(map(readable, tokenizer.chat_template)))
        problem = f"tokenizer {name!r} has several chat templates, and none is the default"
        raise DataError("DATA034", problem, names, fix="give one by --chat-template FILE") from None


def read_template(path: Path) -> str:
    """The text of a chat template.

    Raises:
        ConfigError: PREP009, the file can't be read.

    """
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "name a file with a Jinja template"
        raise ConfigError("PREP009", f"--chat-template {path} can't be read", str(error), fix=fix) from None


def load_encoder(name: str, revision: str | None, texts: Callable[[], Iterable[str]]) -> DocumentEncoder:
    """The encoder of that name; ``byte`` needs no files.

    Args:
        name: ``byte``, ``characters``, or the tokenizer's name or folder.
        revision: its revision on the hub.
        texts: returns all documents, for the vocabulary of ``characters``.

    Raises:
        HyphaError: the tokenizer can't be loaded or used.

    """
    if name == "byte":
        return ByteEncoder()
    if name == "characters":
        return TokenizerEncoder(character_tokenizer(texts()), name, revision)
    return TokenizerEncoder(load_tokenizer(name, revision), name, revision)


def begin_of(tokenizer: Any) -> tuple[int, ...]:
    """The ids that a tokenizer puts before a text, such as ``<s>``; empty if there are none."""
    body: list[int] = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    full_ids: list[int] = tokenizer(_TEXT)["input_ids"]
    for start in range(len(full_ids)):
        if full_ids[start : start + len(body)] == body:
            return tuple(full_ids[:start])
    return ()


def vocabulary_size(tokenizer: Any) -> int:
    """One more than a tokenizer's largest id, and the number of its tokens at least."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    return max(len(tokenizer), largest + 1)


def ends_among(tokenizer: Any, last_ids: Sequence[int]) -> tuple[int, ...]:
    """The ends among the last tokens of answers, the most frequent first.

    An end is a special token, but not the one for unknown text. A token that was added to a vocabulary without being
    called special is an end if it ends most answers.
    """
    added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
    special = set(tokenizer.all_special_ids)
    for token_id, token in added.items():
        if token.special:
            special.add(token_id)
    counts = Counter(last_ids)
    del counts[tokenizer.unk_token_id]
    ends = []
    for token_id, count in counts.most_common():
        if token_id in special or (token_id in added and 2 * count > len(last_ids)):
            ends.append(token_id)
    return tuple(ends)
