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
        what = f"dataset {name!r} is of an earlier release, and doesn't tell which tokens begin its texts and end them"
        yield f"{what}: none begins them, and the tokenizer's end token ends them; prepare it again to change that"
    found = job_preprocessor(case.job, case.source)
    tokenizer = getattr(found, "tokenizer", found)
    if not hasattr(tokenizer, "get_vocab"):
        return
    yield from _of_rows(tokenizer, case.facts.vocab_size)
    base = inherited(case.job.model, case.source)
    if rules is None:
        return
    if base is not None and base.begin != rules.begin:
        what = f"texts of dataset {name!r} begin with {_ids(rules.begin)}, and those that the model was trained on with"
        yield f"{what} {_ids(base.begin)}: prepare both with the same tokenizer"
    others = {"the model was trained with": None if base is None else base.template_sha256}
    others["the tokenizer of preprocessor.repository has"] = _template_of(tokenizer)
    for whose, template in others.items():
        if rules.template_sha256 and template and template != rules.template_sha256:
            yield f"{whose} another chat template than dataset {name!r}: answers may suffer; use one for both"


def _of_rows(tokenizer: Any, rows: int | None) -> Iterator[str]:
    """Yield a note about rows of a model that stand for no token."""
    if rows is not None and (unknown := vocabulary_of(tokenizer).unknown(rows)):
        what = f"the model has {rows:,} rows, the tokenizer {rows - len(unknown):,} tokens"
        yield f"{what}: the other {len(unknown):,} rows stand for nothing, and are never generated"


def _template_of(tokenizer: Any) -> str | None:
    """Return the hash of the template that a tokenizer takes for chats without tools; None without any."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    return hashlib.sha256(str(tokenizer.get_chat_template(None, None)).encode()).hexdigest()


def _ids(begin: tuple[int, ...]) -> str:
    return f"token {' '.join(map(str, begin))}" if begin else "no special token"


def muon_notes(case: Case) -> list[str]:
    """Return a note with the numbers of parameters of both optimizers; none under another inner optimizer."""
    if case.job.inner_optimizer.name != "muon":
        return []
    counts = shares(case.network)
    total = sum(counts.values())
    taken = counts.pop(MATRICES, 0)
    rest = ", ".join(f"{count:,} of {kind}" for kind, count in counts.items())
    note = f"muon steps on {taken:,} of {total:,} parameters ({taken / max(1, total):.1%}), those of matrices"
    return [f"{note}; AdamW on the rest: {rest}" if rest else note]
