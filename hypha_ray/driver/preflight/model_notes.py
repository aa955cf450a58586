"""Notes about a model before a start: tokens decided differently elsewhere, and Muon's parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from hypha_ray.driver.datasets.job_tokenizer import inherited, is_silent, job_preprocessor
from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.model.vocabulary import vocabulary_of
from hypha_ray.optim.muon import MATRICES, shares

_WRITE = ("causal-lm", "seq2seq-lm")
"""Tasks whose models write text."""


def token_notes(case: Case) -> Iterator[str]:
    """Yield notes about tokens for the user of a model that writes text."""
    if case.task.name not in _WRITE:
        return
    name = case.manifest.name
    rules = case.manifest.tokens
    if is_silent(case.manifest):
        gap = f"dataset {name!r} is of an earlier release, and doesn't tell which tokens begin its texts and end them"
        yield f"{gap}: none begins them, and the tokenizer's end token ends them; prepare it again to change that"
    preprocessor = job_preprocessor(case.job, case.source)
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    if not hasattr(tokenizer, "get_vocab"):
        return
    yield from _row_notes(tokenizer, case.facts.vocab_size)
    model_rules = inherited(case.job.model, case.source)
    if rules is None:
        return
    if model_rules is not None and model_rules.begin != rules.begin:
        dataset_begin = f"texts of dataset {name!r} begin with {_ids(rules.begin)}"
        model_begin = f"those that the model was trained on with {_ids(model_rules.begin)}"
        yield f"{dataset_begin}, and {model_begin}: prepare both with the same tokenizer"
    templates = {
        "the model was trained with": None if model_rules is None else model_rules.template_sha256,
        "the tokenizer of preprocessor.repository has": _template_of(tokenizer),
    }
    for subject, template in templates.items():
        if rules.template_sha256 and template and template != rules.template_sha256:
            yield f"{subject} another chat template than dataset {name!r}: answers may suffer; use one for both"


def _row_notes(tokenizer: Any, rows: int | None) -> Iterator[str]:
    """Yield a note about rows of a model that stand for no token."""
    if rows is None:
        return
    size = vocabulary_of(tokenizer).size
    if size is not None and size > rows:
        counts = f"the tokenizer has {size:,} tokens, the model {rows:,} rows"
        yield f"{counts}: the dataset has none of the last {size - rows:,}, and prompts that have one will be refused"
        return
    unknown = vocabulary_of(tokenizer).unknown(rows)
    if unknown:
        counts = f"the model has {rows:,} rows, the tokenizer {rows - len(unknown):,} tokens"
        yield f"{counts}: the other {len(unknown):,} rows stand for nothing, and are never generated"


def _template_of(tokenizer: Any) -> str | None:
    """Return the hash of the template that a tokenizer takes for chats without tools; None without any."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    template = str(tokenizer.get_chat_template(None, None))
    return hashlib.sha256(template.encode()).hexdigest()


def _ids(begin: tuple[int, ...]) -> str:
    if not begin:
        return "no special token"
    return f"token {' '.join(map(str, begin))}"


def muon_notes(case: Case) -> list[str]:
    """Return a note with the numbers of parameters of both optimizers; none under another inner optimizer."""
    if case.job.inner_optimizer.name != "muon":
        return []
    counts = shares(case.network)
    total = sum(counts.values())
    matrices = counts.pop(MATRICES, 0)
    share = matrices / max(1, total)
    note = f"muon steps on {matrices:,} of {total:,} parameters ({share:.1%}), those of matrices"
    if counts:
        adamw = ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())
        note += f"; AdamW on the rest: {adamw}"
    return [note]
