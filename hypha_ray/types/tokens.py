"""Decisions about tokens that hold wherever a model is trained and used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Decisions of a preparation about tokens, which training, generation and export obey.

    `begin` are the ids that begin a text, a pair or a prompt without a template; empty if nothing does. `ends` are the
    ids that end texts and answers: generation stops at any of them. `vocab_size` is the number of the tokenizer's
    tokens, and one more than its largest id; a model's further ids stand for nothing. `template_sha256` is the hash of
    the chat template's text in UTF-8; None without a template.
    """

    begin: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    vocab_size: int | None = None
    template_sha256: str | None = None
