"""Tokenizers and image processors: lookup, loading, their way to workers, decisions about tokens, and vocabularies.

manifest ──► tokenizer of the job ─┬─► workers and islands, servers that generate, trainers outside of Ray
                                   └─► saved model ──► generate, lm-eval, and later jobs that begin with it

Decisions about tokens travel in a tokenizer's configuration. The machines of workers may have neither its files nor the
dataset's. A vocabulary has the ids that stand for tokens. A model may have further rows, as weights are padded; its
policy never chooses those.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import CheckpointError, ConfigError, reason_of
from hypha_ray.model.sources import base_of, fetch, hub_token, remote_code_allowed
from hypha_ray.model.task import SpecialTokens
from hypha_ray.types import TokenRules

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_FILES = ("processor_config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")
RULES: Final = "token_rules"
"""Key of ``tokenizer_config.json``; transformers keeps keys that it doesn't know."""
_TEXTS = ("a", "A", "0", "1", "=", " ")
"""Texts of which at least one has tokens, to find the special tokens that a tokenizer puts around a text."""
_NEVER = float(np.finfo(np.float32).min) / 2
"""Logit of an id in a gap: its probability is 0, and so is its part of an entropy, which -∞ would make NaN."""


def load_preprocessor(preprocessor: Preprocessor, dataset: Path | None, model: Model) -> Any | None:
    """Load a job's tokenizer or image processor.

    It comes from `preprocessor.repository`, otherwise from the dataset, otherwise from the model's repository. For an
    adapter without one it comes from the base model.

    Args:
        preprocessor: table of the job file.
        dataset: folder of the prepared dataset, which is searched with its subfolders; None: not on this machine.
        model: table of the job file.

    Returns:
        Object with `save_pretrained`; None if there is no preprocessor.

    Raises:
        CheckpointError: files in `preprocessor.repository` are missing, or any files are damaged.
        HyphaError: a hub refuses or can't be reached.

    """
    token = hub_token(model)
    is_trusted = remote_code_allowed(model.trust_remote_code)
    if preprocessor.repository:
        return _load(fetch(preprocessor.repository, preprocessor.revision, token, needs_code=is_trusted), is_trusted)
    if dataset is not None:
        for folder in _folders(dataset):
            if _has_preprocessor(folder):
                return _load(folder, is_trusted=False)
    if not model.repository:
        return None
    base, _ = base_of(model)
    for table in (model, base):
        folder = fetch(str(table.repository), table.revision, token, needs_code=is_trusted)
        if _has_preprocessor(folder):
            return _load(folder, is_trusted)
    return None


def load_special_tokens(preprocessor: Preprocessor, dataset: Path | None, model: Model) -> SpecialTokens | None:
    """Return the special tokens of a job's tokenizer; None if it has none.

    Raises:
        HyphaError: any error of `load_preprocessor`.

    """
    loaded_preprocessor = load_preprocessor(preprocessor, dataset, model)
    tokenizer: Any = getattr(loaded_preprocessor, "tokenizer", loaded_preprocessor)
    if not hasattr(tokenizer, "all_special_ids"):
        return None
    return SpecialTokens(getattr(tokenizer, "mask_token_id", None), tuple(tokenizer.all_special_ids))


def _folders(dataset: Path) -> list[Path]:
    """Return a dataset's folder and its subfolders; none on a machine without the dataset."""
    if not dataset.is_dir():
        return []
    subfolders = sorted(child for child in dataset.iterdir() if child.is_dir())
    return [dataset, *subfolders]


def _has_preprocessor(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _FILES)


def _load(folder: Path, is_trusted: bool) -> Any:
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=is_trusted)
    except Exception as error:  # Tokenizers raise anything from KeyError to exceptions of their Rust code.
        raise CheckpointError(
            "MODEL011",
            f"tokenizer or image processor in {folder} can't be loaded",
            reason_of(error),
            fix="name one in preprocessor.repository",
        ) from error


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
        save_flat(tokenizer, Path(folder))
        paths = sorted(path for path in Path(folder).iterdir() if path.is_file())
        files = tuple((path.name, path.read_bytes()) for path in paths)
    return PackedTokenizer(getattr(tokenizer, "mask_token_id", None), tuple(tokenizer.all_special_ids), files)


def save_flat(preprocessor: Any, folder: Path) -> None:
    """Save a tokenizer or another preprocessor; of several chat templates none is in a folder within the folder.

    Transformers would write all but the default one there, and copies of a folder's files would lack those.
    """
    has_names = isinstance(getattr(preprocessor, "chat_template", None), Mapping)
    if has_names and hasattr(preprocessor, "get_chat_template"):  # Processors have no such setting.
        preprocessor.save_pretrained(folder, save_jinja_files=False)
    else:
        preprocessor.save_pretrained(folder)


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
    begin_ids, end_ids = _special_tokens(tokenizer)
    end = end_token(tokenizer)
    if not translates:
        end_ids = []
    elif end is not None and end not in end_ids:
        end_ids = [*end_ids, end]
    if not translates and (rules.begin or rules.template_sha256 is None):
        begin_ids = list(rules.begin)
    _set_special_tokens(tokenizer, begin_ids, end_ids)
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
    _, end_ids = _special_tokens(tokenizer)
    if translates:
        end = end_token(tokenizer)
        if ids and end is not None and end not in end_ids:
            ids.append(end)
        return ids
    if end_ids and ids[-len(end_ids) :] == end_ids:
        ids = ids[: -len(end_ids)]
    return ids


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and behind a text."""
    for text in _TEXTS:
        bare_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        full_ids = list(tokenizer(text, add_special_tokens=True)["input_ids"])
        if not bare_ids:
            continue
        for start in range(len(full_ids) - len(bare_ids) + 1):
            end = start + len(bare_ids)
            if full_ids[start:end] == bare_ids:
                return full_ids[:start], full_ids[end:]
    return [], []


def _set_special_tokens(tokenizer: Any, begin_ids: Sequence[int], end_ids: Sequence[int]) -> None:
    """Let a tokenizer put these ids around each text, from now on and when it is saved and loaded again."""
    if not tokenizer.is_fast or _special_tokens(tokenizer) == ([*begin_ids], [*end_ids]):
        return
    from tokenizers.processors import TemplateProcessing

    begin_names = [tokenizer.convert_ids_to_tokens(token) for token in begin_ids]
    end_names = [tokenizer.convert_ids_to_tokens(token) for token in end_ids]
    ids_by_name = dict(zip([*begin_names, *end_names], [*begin_ids, *end_ids], strict=True))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*begin_names, "$A", *end_names],
        pair=[*begin_names, "$A", *end_names, "$B:1", *end_names],
        special_tokens=list(ids_by_name.items()),
    )


def _parse_rules(table: Any) -> TokenRules | None:
    if not isinstance(table, Mapping):
        return None
    begin = tuple(int(token) for token in table.get("begin", ()))
    ends = tuple(int(token) for token in table.get("ends", ()))
    return TokenRules(begin, ends, table.get("vocab_size"), table.get("template_sha256"), table.get("system"))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids of a tokenizer."""

    size: int | None = None
    """One more than the largest id; None: each row of a model is a token."""
    gaps: tuple[int, ...] = ()
    """Smaller ids without a token."""

    def __contains__(self, token: int) -> bool:
        return token >= 0 and (self.size is None or token < self.size) and token not in self.gaps

    def known(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits, [..., rows], of the tokens alone: [..., size], with those of the gaps at no probability."""
        logits = logits[..., : self.size]
        if not self.gaps:
            return logits
        import torch

        return logits.index_fill(-1, torch.tensor(self.gaps, device=logits.device), _NEVER)

    def unknown(self, rows: int) -> list[int]:
        """Return the ids without a token, for a model with that many rows."""
        if self.size is None:
            return list(self.gaps)
        return [*self.gaps, *range(self.size, rows)]


EVERY_ROW: Final = Vocabulary()
"""Vocabulary in which each row of a model is a token."""


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a tokenizer; all rows of a model count if the tokenizer doesn't list its tokens."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    if get_vocab is None:
        return EVERY_ROW
    ids = set(get_vocab().values())
    if not ids:
        return EVERY_ROW
    vocabulary_size = max(ids) + 1
    if len(ids) >= vocabulary_size:
        return Vocabulary(vocabulary_size)
    gaps = set(range(vocabulary_size)) - ids
    return Vocabulary(vocabulary_size, tuple(sorted(gaps)))


def settle_generation(network: PreTrainedModel, preprocessor: Any | None) -> list[int]:
    """Let a model's generation end where answers end, and leave out ids that stand for no token.

    Args:
        network: the model, whose settings of generation are changed.
        preprocessor: its tokenizer, or a processor that has one; without any nothing changes.

    Returns:
        Ids of the tokens that end an answer.

    """
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    settings = getattr(network, "generation_config", None)
    if settings is None or not network.can_generate() or not hasattr(tokenizer, "get_vocab"):
        return []
    rows = network.config.get_text_config().vocab_size
    ends = [end for end in all_end_tokens(network, tokenizer) if end < rows]
    if len(ends) > 1:
        settings.eos_token_id = ends
    else:
        settings.eos_token_id = ends[0] if ends else None
    suppressed = set(settings.suppress_tokens or ())
    if max(suppressed, default=None) == rows - 1:
        suppressed = set()  # An earlier export wrote these, maybe for fewer tokens.
    suppressed.update(vocabulary_of(tokenizer).unknown(rows))
    settings.suppress_tokens = sorted(suppressed) or None
    return ends
