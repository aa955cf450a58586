"""Text to token ids: bytes, or any Hugging Face tokenizer."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.hub import fetch

Tokens: TypeAlias = npt.NDArray[np.int32]

FOLDER = "tokenizer"
"""Folder of the tokenizer, beside the slices; it is shipped with the trained model."""
_SPARE = 125
"""Tokens of ByT5 that no text has."""


class Encoder(Protocol):
    """Makes one run of token ids out of documents, each followed by the token for its end."""

    def encode(self, documents: Sequence[str]) -> Tokens:
        """Ids of all documents in one row. Text is taken literally: ``</s>`` in a document is four characters."""
        ...

    def save(self, folder: Path) -> PreprocessorInfo:
        """Save the tokenizer below `folder` and say what it is."""
        ...

    @property
    def advice(self) -> str:
        """Note for users of the saved tokenizer; empty without any."""
        ...


class ByteEncoder:
    """ByT5's bytes (arXiv 2105.13626): id = byte + 3, end = 1. The same ids as transformers' ByT5Tokenizer gives.

    That one takes a Python step for every byte; this one none.
    """

    OFFSET = 3
    END = 1

    def encode(self, documents: Sequence[str]) -> Tokens:
        """Ids of all documents in one row."""
        # The byte 0xFF never occurs in UTF-8, so it can stand for a document's end.
        data = b"".join(document.encode() + b"\xff" for document in documents)
        values = np.frombuffer(data, dtype=np.uint8)
        ids = values.astype(np.int32) + self.OFFSET
        ids[values == 0xFF] = self.END
        return ids

    def save(self, folder: Path) -> PreprocessorInfo:
        """Save it as a tokenizer that `AutoTokenizer` loads.

        ByT5's own tokenizer puts an end behind every text, and a model has nothing to say behind an end. This one has
        the same ids and leaves a prompt open.
        """
        tokenizer = _byte_tokenizer()
        _save(tokenizer, folder / FOLDER)
        return PreprocessorInfo("byte", folder=FOLDER, vocab_size=len(tokenizer))

    @property
    def advice(self) -> str:
        """Nothing: the saved tokenizer leaves prompts open."""
        return ""


def _byte_tokenizer() -> Any:
    """ByT5's vocabulary for the tokenizers library: pad, end and unknown, the bytes, and 125 spare tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "</s>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*specials, *_byte_names()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=specials[0],
        eos_token=specials[1],
        unk_token=specials[2],
        additional_special_tokens=[f"<extra_id_{number}>" for number in range(_SPARE)],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _byte_names() -> list[str]:
    """GPT-2's character for each byte: itself where it can be seen, else one behind the first 256."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = itertools.count(0x100)
    return [chr(byte if byte in seen else next(unseen)) for byte in range(0x100)]


class HubEncoder:
    """A tokenizer by hub name or local folder.

    Raises:
        HyphaError: it can't be loaded, or has no token for a document's end.

    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        from transformers import AutoTokenizer

        folder = fetch(name, revision, token=None)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # tokenizers raise anything from KeyError to the exceptions of their Rust code
            found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            fix = "name a tokenizer on the hub, a folder that has one, or 'byte'"
            raise ConfigError("PREP006", f"tokenizer {name!r} can't be loaded", found, fix=fix) from error
        self._name, self._revision = name, revision
        end = self._tokenizer.eos_token_id
        self._end: int | None = self._tokenizer.sep_token_id if end is None else end
        if self._end is None:
            fix = "give it an eos_token and save it, or choose another"
            raise ConfigError("PREP002", f"tokenizer {name!r} has no token for the end of a document", fix=fix)

    def encode(self, documents: Sequence[str]) -> Tokens:
        """Ids of all documents in one row."""
        encoded = self._tokenizer(
            list(documents),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # documents may be longer than the model's context: they are cut into sequences
        )
        ends = itertools.chain.from_iterable((*ids, self._end) for ids in encoded["input_ids"])
        return np.fromiter(ends, dtype=np.int32)

    def save(self, folder: Path) -> PreprocessorInfo:
        """Save it beside the slices."""
        _save(self._tokenizer, folder / FOLDER)
        return PreprocessorInfo(self._name, self._revision, FOLDER, len(self._tokenizer))

    @property
    def advice(self) -> str:
        """Advice for prompts, where the tokenizer puts an end behind every text: a model can't continue that."""
        ends = self._tokenizer("a")["input_ids"][-1:] == [self._end]
        return f"tokenizer {self._name!r} ends every text: give prompts with add_special_tokens=False" if ends else ""


def _save(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer by way of a temporary folder: the library that writes it takes no name that isn't UTF-8."""
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch) / "new"  # unlike the scratch folder, readable for others as usual
        tokenizer.save_pretrained(new)
        shutil.copytree(new, folder)


def load_encoder(name: str, revision: str | None = None) -> Encoder:
    """The encoder of that name; ``byte`` needs nothing.

    Raises:
        HyphaError: the tokenizer can't be loaded or used.

    """
    return ByteEncoder() if name == "byte" else HubEncoder(name, revision)
