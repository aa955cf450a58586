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
from hypha_ray.model.loading.hub import fetch
from hypha_ray.model.tasks.task import SpecialTokens
from hypha_ray.types import TokenRules


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
        files = tuple((path.name, path.read_bytes()) for path in sorted(Path(folder).iterdir()) if path.is_file())
    return PackedTokenizer(getattr(tokenizer, "mask_token_id", None), tuple(tokenizer.all_special_ids), files)


RULES: Final = "token_rules"
"""Key of ``tokenizer_config.json``; transformers keeps keys that it doesn't know."""
_TEXTS = ("a", "A", "0", "1", "=", " ")
"""Texts of which one at least has tokens, by which it is seen which others a tokenizer puts around a text."""


def rules_of(tokenizer: Any) -> TokenRules | None:
    """Return the decisions that a tokenizer carries; None if it carries none."""
    return _parsed(getattr(tokenizer, "init_kwargs", {}).get(RULES))


def saved_rules(model: Model) -> TokenRules | None:
    """Return the decisions that travel with the tokenizer of a model's repository; None without any.

    Raises:
        HyphaError: the repository can't be had.

    """
    if not model.repository:
        return None
    token = model.token.get_secret_value() if model.token else None
    file = fetch(model.repository, model.revision, token) / "tokenizer_config.json"
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return _parsed(settings.get(RULES)) if isinstance(settings, dict) else None


def obey(tokenizer: Any, rules: TokenRules, *, translates: bool = False) -> None:
    """Let a tokenizer carry decisions, and put the tokens around a text that training has had around it.

    Args:
        tokenizer: the tokenizer; one that is written in Python stays as it is, apart from the decisions.
        rules: the decisions. Without a template nothing but `begin` is put before a text. With one, which writes what
            begins a chat itself, other texts begin as the tokenizer begins them.
        translates: it is that of an encoder and a decoder, whose sources end in an end token.

    """
    before, behind = _around(tokenizer)
    if not translates:
        behind = []
    elif (end := end_of(tokenizer)) is not None and end not in behind:
        behind = [*behind, end]
    if not translates and (rules.begin or rules.template_sha256 is None):
        before = list(rules.begin)
    _frame(tokenizer, before, behind)
    tokenizer.init_kwargs[RULES] = asdict(rules)


def end_of(tokenizer: Any) -> int | None:
    """Return the token by which a tokenizer ends a text; None without any."""
    end = getattr(tokenizer, "eos_token_id", None)
    return getattr(tokenizer, "sep_token_id", None) if end is None else end


def named_ends(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text or an answer: of a model's generation settings, of its tokenizer, by its rules.

    Each is named once; a model may have no row for one of them.
    """
    settings = getattr(model, "generation_config", None)
    rules = rules_of(tokenizer)
    own = getattr(settings, "eos_token_id", None)
    found = [*own] if isinstance(own, list) else [own]
    found += [getattr(tokenizer, "eos_token_id", None), *(() if rules is None else rules.ends)]
    return list(dict.fromkeys(one for one in found if one is not None))


def prompt_ids(tokenizer: Any, text: str, *, translates: bool) -> list[int]:
    """Return a text's ids as a prompt: what begins a text is before it, and nothing that ends one is behind it.

    A source for translation ends as it does in prepared pairs: in the end token, and what the tokenizer puts behind it.
    """
    ids = list(tokenizer(text)["input_ids"])
    end = end_of(tokenizer)
    if translates:
        return [*ids, end] if ids and end is not None and end not in _around(tokenizer)[1] else ids
    _, behind = _around(tokenizer)
    return ids[: -len(behind)] if behind and ids[-len(behind) :] == behind else ids


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and behind a text."""
    for text in _TEXTS:
        bare, whole = (list(tokenizer(text, add_special_tokens=each)["input_ids"]) for each in (False, True))
        for start in range(len(whole) - len(bare) + 1 if bare else 0):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
    return [], []


def _frame(tokenizer: Any, before: Sequence[int], behind: Sequence[int]) -> None:
    """Let a tokenizer put these ids around each text, from now on and when it is saved and loaded again."""
    if not tokenizer.is_fast or _around(tokenizer) == ([*before], [*behind]):
        return
    from tokenizers.processors import TemplateProcessing

    first, last = ([tokenizer.convert_ids_to_tokens(one) for one in ids] for ids in (before, behind))
    names = {tokenizer.convert_ids_to_tokens(one): one for one in (*before, *behind)}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, "$B:1", *last],
        special_tokens=list(names.items()),
    )


def _parsed(table: Any) -> TokenRules | None:
    if not isinstance(table, Mapping):
        return None
    begin, ends = (tuple(int(one) for one in table.get(name, ())) for name in ("begin", "ends"))
    return TokenRules(begin, ends, table.get("vocab_size"), table.get("template_sha256"))
