"""Prepared datasets of each kind, as the sha256 of each of their slices.

``python -m tests.support.frozen_datasets`` writes frozen_datasets.json anew. Only a change of the samples that is meant
may do so, and the commit says why.
"""

from __future__ import annotations

import io
import json
import tempfile
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from PIL import Image
from transformers import Wav2Vec2FeatureExtractor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from tests.support.prepared import prepared, table
from tests.support.small_tokenizers import MAKERS

FILE = Path(__file__).with_name("frozen_datasets.json")
WORDS: Final = ["red", "blue", "green", "cat", "dog", "sun", "moon", "tree"]

Source: TypeAlias = Callable[[Path], tuple[Path | str, dict[str, Any]]]
"""Writes the source of a dataset into a folder, and returns it with the options of its preparation."""


def hashes(name: str) -> list[str]:
    """The hash of each slice of a dataset."""
    with tempfile.TemporaryDirectory() as folder:
        source, options = DATASETS[name](Path(folder))
        manifest = prepared(source, Path(folder) / "out", samples_per_slice=16, **options)
        return [info.sha256 for info in manifest.slices]


def _texts(tokenizer: str) -> Source:
    def write(folder: Path) -> tuple[Path, dict[str, Any]]:
        rows = [{"text": " ".join(_words(number, 20))} for number in range(40)]
        return table(folder / "texts.jsonl", *rows), {"tokenizer": _tokenizer(tokenizer, folder), "seq_len": 16}

    return write


def _completions(tokenizer: str) -> Source:
    def write(folder: Path) -> tuple[Path, dict[str, Any]]:
        rows = [{"q": f"Q: {n}+2=", "a": f" {n + 2}"} for n in range(40)]
        options = {"prompt_column": "q", "completion_column": "a", "tokenizer": _tokenizer(tokenizer, folder)}
        return table(folder / "completions.jsonl", *rows), options

    return write


def _chats(tokenizer: str, **options: Any) -> Source:
    def write(folder: Path) -> tuple[Path, dict[str, Any]]:
        rows = [{"messages": _messages(number)} for number in range(40)]
        chosen = {"chat": True, "tokenizer": _tokenizer(tokenizer, folder), **options}
        return table(folder / "chats.jsonl", *rows), chosen

    return write


def _labelled(tokenizer: str) -> Source:
    def write(folder: Path) -> tuple[Path, dict[str, Any]]:
        rows = [{"text": " ".join(_words(n, 1 + n % 9)), "label": ["few", "many"][n % 9 > 4]} for n in range(40)]
        options = {"label_column": "label", "tokenizer": _tokenizer(tokenizer, folder)}
        return table(folder / "labelled.jsonl", *rows), options

    return write


def _tagged(folder: Path) -> tuple[Path, dict[str, Any]]:
    rows = [{"text": _words(n, 1 + n % 9), "tags": [word[0] for word in _words(n, 1 + n % 9)]} for n in range(40)]
    options = {"label_column": "tags", "tokenizer": _tokenizer("wordpiece", folder)}
    return table(folder / "tagged.jsonl", *rows), options


def _translations(tokenizer: str) -> Source:
    def write(folder: Path) -> tuple[Path, dict[str, Any]]:
        rows = [{"de": " ".join(_words(n, 1 + n % 5)), "en": " ".join(_words(n + 1, 2))} for n in range(40)]
        columns = {"source_column": "de", "target_column": "en"}
        return table(folder / "pairs.jsonl", *rows), {**columns, "tokenizer": _tokenizer(tokenizer, folder)}

    return write


def _preferences(tokenizer: str, **options: Any) -> Source:
    def write(folder: Path) -> tuple[Path, dict[str, Any]]:
        rows = [{"prompt": f"Q: {n}+2=", "chosen": f" {n + 2}", "rejected": f" {n + 3}"} for n in range(40)]
        chosen = {"kind": "preferences", "tokenizer": _tokenizer(tokenizer, folder), **options}
        return table(folder / "preferences.jsonl", *rows), chosen

    return write


def _judged(folder: Path) -> tuple[Path, dict[str, Any]]:
    rows = [{"prompt": f"Q: {n}+2=", "completion": f" {n + 2 + n % 2}", "label": n % 2 == 0} for n in range(40)]
    return table(folder / "judged.jsonl", *rows), {"kind": "preferences", "tokenizer": _tokenizer("bare", folder)}


def _prompts(tokenizer: str, **options: Any) -> Source:
    def write(folder: Path) -> tuple[Path, dict[str, Any]]:
        rows = [{"q": f"{n}+2=", "a": str(n + 2)} for n in range(40)]
        columns = {"prompt_column": "q", "answer_column": "a", "tokenizer": _tokenizer(tokenizer, folder)}
        return table(folder / "prompts.jsonl", *rows), {**columns, **options}

    return write


def _problems(folder: Path) -> tuple[str, dict[str, Any]]:
    del folder
    return "problems:sort2", {"tokenizer": "characters", "max_documents": 40}


def _images(folder: Path) -> tuple[Path, dict[str, Any]]:
    ViTImageProcessorPil(size={"height": 4, "width": 6}).save_pretrained(folder / "vit")
    for number in range(20):
        kind = folder / "images" / ["dark", "light"][number % 2]
        kind.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), (number * 12, number, 255 - number)).save(kind / f"{number}.png")
    return folder / "images", {"preprocessor": str(folder / "vit")}


def _recordings(folder: Path) -> tuple[Path, dict[str, Any]]:
    Wav2Vec2FeatureExtractor(sampling_rate=800, do_normalize=False).save_pretrained(folder / "wav2vec2")
    for number in range(20):
        kind = folder / "recordings" / ["low", "high"][number % 2]
        kind.mkdir(parents=True, exist_ok=True)
        (kind / f"{number}.wav").write_bytes(_recording(number))
    return folder / "recordings", {"preprocessor": str(folder / "wav2vec2")}


def _digits(folder: Path) -> tuple[str, dict[str, Any]]:
    del folder
    return "digits", {"max_samples": 40}


DATASETS: Final[dict[str, Source]] = {
    "documents, bytes": _texts("byte"),
    "documents, characters": _texts("characters"),
    "documents, byte-level": _texts("bare"),
    "documents, begin token": _texts("begins"),
    "documents, Unigram": _texts("unigram"),
    "completions, bytes": _completions("byte"),
    "completions, byte-level": _completions("bare"),
    "completions, begin token": _completions("begins"),
    "chats, ChatML": _chats("chatml"),
    "chats, packed": _chats("chatml", pack=True, seq_len=64),
    "chats, Llama 3": _chats("llama3"),
    "chats, Mistral": _chats("mistral"),
    "labelled texts, bytes": _labelled("byte"),
    "labelled texts, WordPiece": _labelled("wordpiece"),
    "labelled words, WordPiece": _tagged,
    "pairs, bytes": _translations("byte"),
    "pairs, end token": _translations("ends"),
    "pairs, begin token": _translations("begins"),
    "preferences, bytes": _preferences("byte"),
    "preferences, begin token": _preferences("begins"),
    "preferences, ChatML": _preferences("chatml", chat=True),
    "preferences, judged": _judged,
    "prompts, bytes": _prompts("byte"),
    "prompts, begin token": _prompts("begins"),
    "prompts, ChatML": _prompts("chatml", chat=True),
    "prompts, generated": _problems,
    "images": _images,
    "images, digits": _digits,
    "recordings": _recordings,
}
"""Sources by the names of their datasets."""


def _words(number: int, length: int) -> list[str]:
    return [WORDS[(number * 5 + place * place) % len(WORDS)] for place in range(length)]


def _messages(number: int) -> list[dict[str, str]]:
    said = [f"say {WORDS[number % 8]}", f"{WORDS[number % 8]} {number}", "say it again", f"{number}"]
    roles = ("user", "assistant") * 2
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)][: 2 + 2 * (number % 2)]


def _tokenizer(name: str, folder: Path) -> str:
    if name not in MAKERS:
        return name
    MAKERS[name]().save_pretrained(folder / name)
    return str(folder / name)


def _recording(number: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 800, 0, "NONE", ""))
        file.writeframes((np.arange(40 + number) * (number + 1) % 200).astype("<i2").tobytes())
    return buffer.getvalue()


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: hashes(name) for name in DATASETS}, indent=1) + "\n")
