"""From chats to a prepared dataset with a loss on the assistant's tokens only.

 chats ─► text and scored parts ─► tokens ─► cut off ─┬─► held out, with their repetitions ─► validation slices
                                                      └─► the rest, shuffled ───────────────► training slices

Tensors: ``input_ids``, ``attention_mask`` and ``labels``, int32 [N, L], padded on the right to the longest chat. A
label is the token itself if it is scored, otherwise -100. Chats are held in memory as a whole.

With --pack there are several chats in a sample, each without attention to the others:

    input_ids       a a a a b b b c c c c c _ _        chats one after the other, then padding
    position_ids    0 1 2 3 0 1 2 0 1 2 3 4 0 0        from 0 in each chat, and 0 at padding
    labels          - - a a - b b - - c c c - -        -100 at the first token of a chat and at padding

Without an ``attention_mask``, models of transformers take a position that isn't one above the last one for the start of
another text. Jobs check that the model does so. Tensors of packed chats are int32 [N, seq_len].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from hypha_ray.data.encoders import DatasetTokenizer, dataset_tokenizer, ends_among
from hypha_ray.data.kinds.chat_templates import (
    ChatTemplate,
    count_lost_thoughts,
    leave_out_ignored,
    note_date,
)
from hypha_ray.data.kinds.kind import Kind, Report, Rows, SliceWriter, no_samples, split, write_split
from hypha_ray.data.kinds.scored_tokens import ScoredText, ScoredTokens, TextTokenizer
from hypha_ray.data.manifest import PreprocessorInfo, TokenRules
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account, amount_text
from hypha_ray.data.slices import Arrays
from hypha_ray.data.sources.chats import Chat, chats
from hypha_ray.model.task import IGNORE_INDEX

_AT_ONCE = 1024
"""Chats that are tokenised at once."""
_OPEN = 64
"""Samples that are being filled at the same time."""

Parts: TypeAlias = list[ScoredTokens]
"""Chats of one sample."""


def write_chats(options: PrepareOptions, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the tokenizer beside them.

    Raises:
        DataError: there are no chats with an answer, or the template can't be used.
        HyphaError: source or tokenizer can't be had.

    """
    answered_chats = list(_answered(chats(options, account), account))
    tokenizer = dataset_tokenizer(options, _texts(answered_chats))
    tokenizer.require_fast()
    encoded = list(encoded_chats(tokenizer, answered_chats, options, report, account))
    samples = list(_fitting(encoded, options.seq_len, account))
    if not samples:
        fix = "raise --seq-len" if answered_chats else "name another --source, or other columns"
        raise no_samples("chats with an answer", options, account, fix)
    writer.tokens = answer_rules(tokenizer, encoded, options, account)
    longest = max(len(sample.ids) for sample in samples)
    keys = [sample.ids.tobytes() + sample.scored.tobytes() for sample in samples]
    splits = split(keys, options, account, "chats")

    def load(rows: Rows) -> Arrays:
        return _arrays([samples[row] for row in rows], longest, tokenizer.padding)

    if options.pack:
        write_packed(samples, splits, options, tokenizer.padding, writer)
    else:
        write_split(splits, load, options.samples_per_slice, writer)
    return tokenizer.save(writer.folder)


def _answered(all_chats: Iterable[Chat], account: Account) -> Iterator[Chat]:
    """Chats with an answer that is scored; the others are put into the account."""
    for chat in all_chats:
        weights = [message.get("weight") for message in chat.messages if message["role"] == "assistant"]
        if not weights:
            account.leave_out("chats", "without a message of the assistant")
        elif all(weight == 0 for weight in weights):
            account.leave_out("chats", "in which all messages of the assistant have the weight 0")
        else:
            yield chat


def _texts(all_chats: Iterable[Chat]) -> Iterator[str]:
    for chat in all_chats:
        for message in chat.messages:
            yield message["role"]
            yield message["content"]


def encoded_chats(
    tokenizer: DatasetTokenizer, all_chats: Sequence[Chat], options: PrepareOptions, report: Report, account: Account
) -> Iterator[ScoredTokens]:
    """Tokens of chats, rendered by the template; without one, of prompt and completion with an end token."""
    templated = options.is_templated
    template = ChatTemplate(tokenizer.base, tokenizer.name)
    texts_tokenizer = TextTokenizer(tokenizer.base, literal=not templated)
    for start in range(0, len(all_chats), _AT_ONCE):
        batch = all_chats[start : start + _AT_ONCE]
        texts = [template.rendered(chat) if templated else _plain(chat) for chat in batch]
        lost_thoughts = 0
        for chat, scored in zip(batch, texts, strict=True):
            lost_thoughts += count_lost_thoughts(chat.messages, scored.text)
        account.leave_out("thoughts", "in answers of which the chat template renders only the rest", lost_thoughts)
        if templated:
            _leave_out_unrendered(template, batch, texts, account)
        for sample in texts_tokenizer.tokenized(texts):
            yield sample if templated else _framed(sample, tokenizer.begin, tokenizer.end)
        report("chats", len(batch))
    if template.unopened:
        unopened_text = amount_text(template.unopened, "answers")
        account.note(
            f"{unopened_text} behind another text than the generation prompt, with which a model will be asked"
        )
    if texts_tokenizer.joined:
        joined_text = amount_text(texts_tokenizer.joined, "chats")
        account.note(
            f"{joined_text} would have other tokens if answers were tokenised together with the text before them"
        )


def _leave_out_unrendered(
    template: ChatTemplate, batch: Sequence[Chat], texts: Sequence[ScoredText], account: Account
) -> None:
    """Put tool calls and other values that the template ignores into the account."""
    lost_calls = 0
    for chat, scored in zip(batch, texts, strict=True):
        lost_calls += template.lost_calls(chat, scored.text)
    account.leave_out("tool calls", "in chats whose template renders none", lost_calls)
    ignored = [template.ignored(chat, scored.text) for chat, scored in zip(batch, texts, strict=True)]
    leave_out_ignored(account, ignored)


def _plain(chat: Chat) -> ScoredText:
    """Prompt and completion, one after the other."""
    prompt, completion = chat.messages
    start = len(prompt["content"])
    text = prompt["content"] + completion["content"]
    return ScoredText(text, ((start, len(text)),))


def _fitting(samples: Iterable[ScoredTokens], most_tokens: int, account: Account) -> Iterator[ScoredTokens]:
    """Samples cut off at a length; those without scored tokens, and the tokens cut off, are put into the account."""
    cut_chats = 0
    for ids, scored in samples:
        # The first token has none before it, so that nothing can predict it.
        if not scored[1:most_tokens].any():
            account.leave_out("chats", f"without an answer in the first {most_tokens} tokens, see --seq-len")
            continue
        cut_tokens = max(0, len(ids) - most_tokens)
        account.leave_out("tokens", f"behind the first {most_tokens} of a chat, see --seq-len", cut_tokens)
        cut_chats += cut_tokens > 0
        yield ScoredTokens(ids[:most_tokens], scored[:most_tokens])
    if cut_chats:
        account.note(f"{amount_text(cut_chats, 'chats')} cut off at --seq-len {most_tokens}")


def _framed(sample: ScoredTokens, begin: Sequence[int], end: int) -> ScoredTokens:
    """A sample behind the tokens that begin a text, and before the token that ends one, which is scored."""
    ids = np.concatenate([begin, sample.ids, [end]]).astype(np.int32)
    scored = np.concatenate([np.zeros(len(begin), np.bool_), sample.scored, [True]])
    return ScoredTokens(ids, scored)


def answer_rules(
    tokenizer: DatasetTokenizer, samples: Sequence[ScoredTokens], options: PrepareOptions, account: Account
) -> TokenRules:
    """Rules of the samples. Answers without an end are noted, since a trained model won't stop behind them."""
    if options.is_templated:
        note_date(tokenizer.base, account)
    last_ids: list[int] = []
    for sample in samples:
        last_ids += _last_scored(sample)
    ends = ends_among(tokenizer.base, last_ids)
    endless_count = sum(token_id not in ends for token_id in last_ids)
    if endless_count == len(last_ids):
        account.note("no answer ends in a special token, so a trained model won't stop: choose another --chat-template")
    elif endless_count:
        endings_text = f"{amount_text(endless_count, 'answers')} of {len(last_ids):,} end in no special token"
        account.note(f"{endings_text}, so a trained model may not stop: choose another --chat-template")
    return tokenizer.rules(ends)


def _last_scored(sample: ScoredTokens) -> list[int]:
    """The last token of each scored part."""
    is_last = sample.scored & ~np.append(sample.scored[1:], False)
    last_ids: list[int] = sample.ids[is_last].tolist()
    return last_ids


def _arrays(samples: Sequence[ScoredTokens], length: int, padding: int) -> Arrays:
    """Tensors of some samples, padded on the right."""
    tokens = np.full((len(samples), length), padding, np.int32)
    mask = np.zeros_like(tokens)
    labels = np.full_like(tokens, IGNORE_INDEX)
    for row, (ids, scored) in enumerate(samples):
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = np.where(scored, ids, IGNORE_INDEX)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def write_packed(
    samples: Sequence[ScoredTokens],
    splits: tuple[Rows, Rows],
    options: PrepareOptions,
    padding: int,
    writer: SliceWriter,
) -> None:
    """Pack the chats of each split in their order, and write the slices."""
    samples_per_slice = options.samples_per_slice
    for rows, name in zip(splits, ("train", "validation"), strict=True):
        packed_rows = pack_chats([samples[row] for row in rows], options.seq_len)
        for start in range(0, len(packed_rows), samples_per_slice):
            writer.add(_packed_arrays(packed_rows[start : start + samples_per_slice], options.seq_len, padding), name)


def pack_chats(chats: Iterable[ScoredTokens], most_tokens: int) -> list[Parts]:
    """Put each chat into the first of the last `_OPEN` samples with space for it; a sample has `most_tokens`."""
    packed_rows: list[Parts] = []
    free_tokens: list[int] = []
    for chat in chats:
        open_index = max(0, len(packed_rows) - _OPEN)
        while open_index < len(packed_rows) and free_tokens[open_index] < len(chat.ids):
            open_index += 1
        if open_index == len(packed_rows):
            packed_rows.append([])
            free_tokens.append(most_tokens)
        packed_rows[open_index].append(chat)
        free_tokens[open_index] -= len(chat.ids)
    return packed_rows


def _packed_arrays(packed_rows: Sequence[Parts], length: int, padding: int) -> Arrays:
    tokens = np.full((len(packed_rows), length), padding, np.int32)
    positions = np.zeros_like(tokens)
    labels = np.full_like(tokens, IGNORE_INDEX)
    for row, parts in enumerate(packed_rows):
        start = 0
        for ids, scored in parts:
            end = start + len(ids)
            tokens[row, start:end] = ids
            positions[row, start:end] = np.arange(len(ids))
            labels[row, start + 1 : end] = np.where(scored, ids, IGNORE_INDEX)[1:]
            start = end
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}


KIND: Final = Kind(write_chats, "language", "those of the chats are")
