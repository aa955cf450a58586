"""Tokenizers on their way to workers, and the decisions about tokens that travel in their configuration.

manifest ──► tokenizer of the job ─┬─► workers and islands, servers that generate, trainers outside of Ray
                                   └─► saved model ──► generate, lm-eval, and later jobs that begin with it

The machines of workers may have neither a tokenizer's files nor the dataset's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hypha_ray.config.schema import Model
from hypha_ray.errors import ConfigError
from hypha_ray.model.loading.hub import fetch, hub_token
from hypha_ray.model.task import SpecialTokens
from hypha_ray.types import TokenRules

RULES: Final = "token_rules"
"""Key of ``tokenizer_config.json``; transformers keeps keys that it doesn't know."""
_TEXTS = ("a", "A", "0", "1", "=", " ")
"""Texts of which at least one has tokens, to find the special tokens that a tokenizer puts around a text."""


@dataclass(frozen=True, slots=True)
class PackedTokenizer(SpecialTokens):
    """A whole tokenizer, for workers that make texts of tokens."""

    files: tuple[tuple[str, bytes], ...]
    """Names and contents of its files."""

    def load(self) -> Any:
        """Build the tokenizer."""
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.files:
                Path(folder, name).write_bytes(content)
            return AutoTokenizer.from_pretrained(folder)


def tokenizer_of(preprocessor: Any | None) -> Any:
    """Return the tokenizer that a preprocessor from `load_preprocessor` is or has.

    Raises:
        ConfigError: RL003, there is none.

    """
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    if not hasattr(tokenizer, "decode"):
        fix = "prepare the dataset with one, or name one in preprocessor.repository"
        raise ConfigError("RL003", "texts can't be made of responses: there is no tokenizer", fix=fix)
    return tokenizer


def pack(tokenizer: Any) -> PackedTokenizer:
    """Pack a tokenizer with all its files."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).iterdir() if path.is_file())
        files = tuple((path.name, path.read_bytes()) for path in paths)
    return PackedTokenizer(getattr(tokenizer, "mask_token_id", None), tuple(tokenizer.all_special_ids), files)


def rules_of(tokenizer: Any) -> TokenRules | None:
    """Return the decisions that a tokenizer carries; None if it carries none."""
    settings = getattr(tokenizer, "init_kwargs", {})
    return _parse_rules(settings.get(RULES))


def is_templated(tokenizer: Any) -> bool:
    """Whether the prompts of the dataset that a tokenizer comes with were put into its chat template."""
    rules = rules_of(tokenizer)
    return rules is not None and rules.template_sha256 is not None


def saved_rules(model: Model) -> TokenRules | None:
    """Return the decisions that travel with the tokenizer of a model's repository; None without any.

    Raises:
        HyphaError: the repository can't be fetched.

    """
    if not model.repository:
        return None
    file = fetch(model.repository, model.revision, hub_token(model)) / "tokenizer_config.json"
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict):
        return None
    return _parse_rules(settings.get(RULES))


def apply_rules(tokenizer: Any, rules: TokenRules, *, translates: bool = False) -> None:
    """Store decisions in a tokenizer, and let it put the same special tokens around texts as in training.

    Args:
        tokenizer: the tokenizer; one that is written in Python only stores the decisions.
        rules: the decisions. Without a chat template, only the tokens `begin` come before a text. A template writes the
            beginning of a chat itself; then other texts begin with the tokenizer's own special tokens.
        translates: the tokenizer is that of an encoder-decoder, whose sources end with an end token.

    """
    before, behind = _special_tokens(tokenizer)
    end = end_token(tokenizer)
    if not translates:
        behind = []
    elif end is not None and end not in behind:
        behind = [*behind, end]
    if not translates and (rules.begin or rules.template_sha256 is None):
        before = list(rules.begin)
    _set_special_tokens(tokenizer, before, behind)
    tokenizer.init_kwargs[RULES] = asdict(rules)


def end_token(tokenizer: Any) -> int | None:
    """Return the token by which a tokenizer ends a text; None if it has none."""
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None:
        end = getattr(tokenizer, "sep_token_id", None)
    return end


def all_end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text or an answer: of a model's generation settings, of its tokenizer, by its rules.

    Each is named once; a model may have no row for one of them.
    """
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    ends = list(ends) if isinstance(ends, list) else [ends]
    ends.append(getattr(tokenizer, "eos_token_id", None))
    rules = rules_of(tokenizer)
    if rules is not None:
        ends += rules.ends
    return list(dict.fromkeys(end for end in ends if end is not None))


def prompt_ids(tokenizer: Any, text: str, *, translates: bool) -> list[int]:
    """Return a text's ids as a prompt, with the special tokens before a text and without those behind it.

    A source for translation ends as in prepared pairs: with the special tokens behind a text, and an end token.
    """
    ids = list(tokenizer(text)["input_ids"])
    _, behind = _special_tokens(tokenizer)
    if translates:
        end = end_token(tokenizer)
        if ids and end is not None and end not in behind:
            ids.append(end)
        return ids
    if behind and ids[-len(behind) :] == behind:
        ids = ids[: -len(behind)]
    return ids


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and behind a text."""
    for text in _TEXTS:
        bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        whole = list(tokenizer(text, add_special_tokens=True)["input_ids"])
        if not bare:
            continue
        for start in range(len(whole) - len(bare) + 1):
            end = start + len(bare)
            if whole[start:end] == bare:
                return whole[:start], whole[end:]
    return [], []


def _set_special_tokens(tokenizer: Any, before: Sequence[int], behind: Sequence[int]) -> None:
    """Let a tokenizer put these ids around each text, from now on and when it is saved and loaded again."""
    if not tokenizer.is_fast or _special_tokens(tokenizer) == ([*before], [*behind]):
        return
    from tokenizers.processors import TemplateProcessing

    first = [tokenizer.convert_ids_to_tokens(token) for token in before]
    last = [tokenizer.convert_ids_to_tokens(token) for token in behind]
    ids_by_name = dict(zip([*first, *last], [*before, *behind], strict=True))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, "$B:1", *last],
        special_tokens=list(ids_by_name.items()),
    )


def _parse_rules(table: Any) -> TokenRules | None:
    if not isinstance(table, Mapping):
        return None
    begin = tuple(int(token) for token in table.get("begin", ()))
    ends = tuple(int(token) for token in table.get("ends", ()))
    return TokenRules(begin, ends, table.get("vocab_size"), table.get("template_sha256"))
