"""Small tokenizers of the kinds that models have, made without training: the same ids wherever they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hypha_ray.data.encoders import byte_tokenizer

WORDS = [
    "red",
    "blue",
    "green",
    "cat",
    "dog",
    "sun",
    "moon",
    "tree",
    "say",
    "Q",
    "A",
    ":",
    "=",
    "+",
    "10",
    "11",
    "12",
    "two",
    "three",
    "user",
    "assistant",
    "model",
    "system",
]
"""Words that are one token; other text is tokenised into characters or bytes."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LINES = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Turns without special tokens, whose generation prompt ends in a space."""


def begins() -> Any:
    """Puts ``<s>`` before every text, as Llama's do."""
    return _wrapped(_byte_level(["<s>", "</s>"], begin="<s>"), bos_token="<s>", eos_token="</s>")


def ends() -> Any:
    """Puts ``</s>`` behind every text, as T5's does."""
    return _wrapped(_byte_level(["</s>"], end="</s>"), eos_token="</s>")


def bare() -> Any:
    """Adds nothing to a text, as GPT-2's."""
    return _wrapped(_byte_level(["<|endoftext|>"]), bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def chatml() -> Any:
    """That of a base model with ChatML: answers end in a token that isn't its end of a text."""
    marks = ["<|im_start|>", "<|im_end|>"]
    found = _wrapped(_byte_level(["<|endoftext|>", *marks]), eos_token="<|endoftext|>", extra_special_tokens=marks)
    found.chat_template = CHATML
    return found


def llama3() -> Any:
    """Has the turns of Llama 3; it puts a begin token before every text, and so does its template."""
    marks = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    found = _wrapped(
        _byte_level([*names.values(), *marks], begin="<|begin_of_text|>"), **names, extra_special_tokens=marks
    )
    found.chat_template = LLAMA3
    return found


def gemma() -> Any:
    """Has the turns of Gemma: spaces are part of pieces, and no text gets a space before it."""
    marks = ["<start_of_turn>", "<end_of_turn>"]
    tokenizer = _pieces(["<pad>", "<eos>", "<bos>", "<unk>", *marks])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _frame(tokenizer, "<bos>", "")
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    found = _wrapped(tokenizer, **names, extra_special_tokens=marks)
    found.chat_template = GEMMA
    return found


def mistral() -> Any:
    """Has the turns of Mistral; every text gets a space before it, behind special tokens too."""
    marks = ["[INST]", "[/INST]"]
    tokenizer = _pieces(["<unk>", "<s>", "</s>", *marks])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    _frame(tokenizer, "<s>", "")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = _wrapped(tokenizer, **names, extra_special_tokens=marks)
    found.chat_template = MISTRAL
    return found


def prefixed() -> Any:
    """A byte-level one that puts a space before every text."""
    return _wrapped(_byte_level(["</s>"], prefix_space=True), eos_token="</s>")


def wordpiece() -> Any:
    """Has whole words and ``##`` for the rest of a word, between ``[CLS]`` and ``[SEP]``, as BERT's."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = [chr(code) for code in range(0x21, 0x7F)]
    pieces = dict.fromkeys([*specials, *characters, *(f"##{one}" for one in characters), *map(str, WORDS)])
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    _frame(tokenizer, "[CLS]", "[SEP]")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return _wrapped(tokenizer, **names, mask_token="[MASK]")


def phi() -> Any:
    """Has the turns of Phi 3: special tokens take in the spaces and newlines behind them."""
    tokenizer = _byte_level(["<|endoftext|>"])
    marks = [AddedToken(f"<|{name}|>", rstrip=True, special=True) for name in ("user", "assistant", "end")]
    tokenizer.add_special_tokens(marks)
    found = _wrapped(tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    found.chat_template = PHI
    return found


def unigram() -> Any:
    """One of SentencePiece, whose texts begin with a space that is written ▁."""
    specials = ["<pad>", "</s>", "<unk>"]
    characters = [chr(code) for code in range(0x21, 0x7F)]
    pieces = dict.fromkeys(["▁", "\n", *characters, *WORDS, *(f"▁{word}" for word in WORDS)])
    scored = [*((one, 0.0) for one in specials), *((piece, -12.0 + len(piece)) for piece in pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _wrapped(tokenizer, **names)


def lines() -> Any:
    """Adds nothing to a text, and has a template without special tokens for turns."""
    found = bare()
    found.chat_template = LINES
    return found


MAKERS: Final[dict[str, Callable[[], Any]]] = {
    "begins": begins,
    "ends": ends,
    "bare": bare,
    "chatml": chatml,
    "llama3": llama3,
    "gemma": gemma,
    "mistral": mistral,
    "prefixed": prefixed,
    "wordpiece": wordpiece,
    "unigram": unigram,
    "bytes": byte_tokenizer,
    "lines": lines,
    "phi": phi,
}
"""Makers of tokenizers by the names of their kinds."""


def _byte_level(specials: Iterable[str], begin: str = "", end: str = "", prefix_space: bool = False) -> Tokenizer:
    """BPE of bytes: each byte, and each word with a space before it or without."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = _merged([*specials, *alphabet], "Ġ", ["ĠĠ", "ĊĊ"])
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    _frame(tokenizer, begin, end)
    return tokenizer


def _pieces(specials: Iterable[str]) -> Tokenizer:
    """BPE of characters with bytes for all others, in which ▁ stands for a space."""
    characters = ["▁", "\n", *(chr(code) for code in range(0x21, 0x7F))]
    spare = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary, merges = _merged([*specials, *spare, *characters], "▁", ["▁▁"])
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return Tokenizer(model)


def _merged(pieces: list[str], space: str, others: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary, and merges that make each word from left to right, and then put a space before it."""
    merges: dict[tuple[str, str], None] = {}
    for word in (*WORDS, *others):
        for length in range(1, len(word)):
            merges[word[:length], word[length]] = None
    for word in WORDS:
        merges[space, word] = None
    vocabulary = dict.fromkeys([*pieces, *(left + right for left, right in merges)])
    return {piece: number for number, piece in enumerate(vocabulary)}, list(merges)


def _frame(tokenizer: Tokenizer, begin: str, end: str) -> None:
    """Put tokens before and behind each text."""
    if not begin and not end:
        return
    numbers = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token]
    single = f"{begin} $A {end}".split()
    pair = [*single, "$B:1", *([f"{end}:1"] if end else [])]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=numbers)


def _wrapped(tokenizer: Tokenizer, **names: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
