"""From chats to a prepared dataset with a loss on the assistant's tokens only.

 chats ─► text and scored parts ─► tokens ─► cut off ─┬─► held out, with their repetitions ─► validation slices
                                                      └─► the rest, shuffled ───────────────► training slices

Tensors: ``input_ids``, ``attention_mask`` and ``labels``, int32 [N, L], padded on the right to the longest chat. A
label is the token itself if it is scored, otherwise -100. Chats are held in memory as a whole.

With --pack there are several chats in a sample, each without attention to the others:

    input_ids       a a a a b b b c c c c c _ _        chats one after the other, then padding
    position_ids    0 1 2 3 0 1 2 0 1 2 3 4 0 0        from 0 in each chat, and 0 at padding
    labels          - - a a - b b - - c c c - -        -100 at the first token of a chat and at padding

Models of transformers keep tokens apart between which positions don't count on, if there is no ``attention_mask``. Jobs
check that the model does so. Tensors of packed chats are int32 [N, seq_len].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from hypha_ray.data.manifest import PreprocessorInfo, TokenRules
from hypha_ray.data.preparation.encoders import (
    begin_of,
    ends_among,
    padding_of,
    require_end,
    require_fast,
    save_tokenizer,
    token_rules,
    tokenizer_of,
)
from hypha_ray.data.preparation.kinds.chat_templates import ChatTemplate, count_lost_thoughts, leave_out_ignored
from hypha_ray.data.preparation.kinds.kind import Kind
from hypha_ray.data.preparation.kinds.scored_tokens import ScoredText, ScoredTokens, TextTokenizer
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import Report, Rows, SliceWriter, split, write_split
from hypha_ray.data.preparation.sources.chats import Chat, chats
from hypha_ray.data.provenance import Account, counted
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import DataError
from hypha_ray.model.tasks.task import IGNORE_INDEX

_AT_ONCE = 1024
"""Chats that are tokenised at once."""


def write_chats(options: Options, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the tokenizer beside them.

    Raises:
        DataError: there are no chats with an answer, or the template can't be used.
        HyphaError: source or tokenizer can't be had.

    """
    found = list(_answered(chats(options, account), account))
    tokenizer = tokenizer_of(options, _texts(found))
    require_fast(tokenizer, options.tokenizer)
    whole = list(_encoded(tokenizer, found, options, report, account))
    samples = list(_fitting(whole, options.seq_len, account))
    if not samples:
        problem = f"there are no chats with an answer in {options.source}"
        fix = "raise --seq-len" if found else "name another --source, or other columns"
        raise DataError("DATA033", problem, account.left_out or "an empty source", fix=fix)
    writer.tokens = _rules(tokenizer, whole, options, account)
    padding = padding_of(tokenizer, options.tokenizer)
    longest = max(len(sample.ids) for sample in samples)
    keys = [sample.ids.tobytes() + sample.scored.tobytes() for sample in samples]
    splits = split(keys, options, account, "chats")
    if options.pack:
        write_packed(samples, splits, options, padding, writer)
    else:
        write_split(splits, lambda rows: _arrays(samples, rows, longest, padding), options.samples_per_slice, writer)
    return save_tokenizer(tokenizer, writer.folder, options.tokenizer, options.tokenizer_revision)


def _answered(found: Iterable[Chat], account: Account) -> Iterator[Chat]:
    for chat in found:
        weights = [message.get("weight") for message in chat.messages if message["role"] == "assistant"]
        if any(weight != 0 for weight in weights):
            yield chat
        else:
            why = (
                "in which all messages of the assistant have the weight 0"
                if weights
                else "without a message of the assistant"
            )
            account.leave_out("chats", why)


def _texts(found: Iterable[Chat]) -> Iterator[str]:
    for chat in found:
        for message in chat.messages:
            yield from (message["role"], message["content"])


def _encoded(
    tokenizer: Any, found: Sequence[Chat], options: Options, report: Report, account: Account
) -> Iterator[ScoredTokens]:
    """Tokens of chats, rendered by the template; without one, of prompt and completion with an end token."""
    templated = options.is_templated
    template = ChatTemplate(tokenizer, options.tokenizer)
    end = require_end(tokenizer, options.tokenizer)
    begin = begin_of(tokenizer)
    texts_tokenizer = TextTokenizer(tokenizer, literal=not templated)
    for start in range(0, len(found), _AT_ONCE):
        part = found[start : start + _AT_ONCE]
        texts = [template.rendered(chat) if templated else _plain(chat) for chat in part]
        lost = sum(count_lost_thoughts(chat.messages, one.text) for chat, one in zip(part, texts, strict=True))
        account.leave_out("thoughts", "in answers of which the chat template renders only the rest", lost)
        if templated:
            calls = sum(template.lost_calls(chat, one.text) for chat, one in zip(part, texts, strict=True))
            account.leave_out("tool calls", "in chats whose template renders none", calls)
            leave_out_ignored(
                account, [template.ignored(chat, one.text) for chat, one in zip(part, texts, strict=True)]
            )
        for sample in texts_tokenizer.tokenized(texts):
            yield sample if templated else _framed(sample, begin, end)
        report("chats", len(part))
    if texts_tokenizer.joined:
        joined = counted(texts_tokenizer.joined, "chats")
        account.note(f"{joined} would have other tokens if answers were tokenised together with the text before them")


def _plain(chat: Chat) -> ScoredText:
    """Prompt and completion, one after the other."""
    asked, answered = (message["content"] for message in chat.messages)
    return ScoredText(asked + answered, ((len(asked), len(asked) + len(answered)),))


def _fitting(samples: Iterable[ScoredTokens], most: int, account: Account) -> Iterator[ScoredTokens]:
    """Samples cut off at a length; those without scored tokens, and the tokens cut off, are put into the account."""
    cut = 0
    for ids, scored in samples:
        # The first token has none before it, so that nothing can predict it.
        if not scored[1:most].any():
            account.leave_out("chats", f"without an answer in the first {most} tokens, see --seq-len")
            continue
        account.leave_out("tokens", f"behind the first {most} of a chat, see --seq-len", max(0, len(ids) - most))
        cut += len(ids) > most
        yield ScoredTokens(ids[:most], scored[:most])
    if cut:
        account.note(f"{counted(cut, 'chats')} cut off at --seq-len {most}")


def _framed(sample: ScoredTokens, begin: Sequence[int], end: int) -> ScoredTokens:
    """A sample behind the tokens that begin a text, and before the token that ends one, which is scored."""
    ids = np.concatenate([begin, sample.ids, [end]]).astype(np.int32)
    return ScoredTokens(ids, np.concatenate([np.zeros(len(begin), np.bool_), sample.scored, [True]]))


def _rules(tokenizer: Any, samples: Sequence[ScoredTokens], options: Options, account: Account) -> TokenRules:
    """Rules of the samples; notes tell of answers without an end, behind which a trained model won't stop."""
    last = [number for sample in samples for number in _last_scored(sample)]
    ends = ends_among(tokenizer, last)
    endless = sum(number not in ends for number in last)
    if endless == len(last):
        account.note("no answer ends in a special token, so a trained model won't stop: choose another --chat-template")
    elif endless:
        found = f"{counted(endless, 'answers')} of {len(last):,} end in no special token"
        account.note(f"{found}, so a trained model may not stop: choose another --chat-template")
    return token_rules(tokenizer, ends, templated=options.is_templated)


def _last_scored(sample: ScoredTokens) -> list[int]:
    """The last token of each scored part."""
    is_last = sample.scored & ~np.append(sample.scored[1:], False)
    found: list[int] = sample.ids[is_last].tolist()
    return found


def _arrays(samples: Sequence[ScoredTokens], rows: Rows, length: int, padding: int) -> Arrays:
    """Tensors of some samples, padded on the right."""
    tokens = np.full((len(rows), length), padding, np.int32)
    mask = np.zeros_like(tokens)
    labels = np.full_like(tokens, IGNORE_INDEX)
    for place, (ids, scored) in enumerate(samples[row] for row in rows):
        tokens[place, : len(ids)], mask[place, : len(ids)] = ids, 1
        labels[place, : len(ids)] = np.where(scored, ids, IGNORE_INDEX)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


KIND: Final = Kind(write_chats, "language", "those of the chats are")


_OPEN = 64
"""Samples that are being filled at the same time."""

Parts: TypeAlias = list[ScoredTokens]
"""Chats of one sample."""


def write_packed(
    samples: Sequence[ScoredTokens], splits: tuple[Rows, Rows], options: Options, padding: int, writer: SliceWriter
) -> None:
    """Pack the chats of each split in their order, and write the slices."""
    size = options.samples_per_slice
    for rows, name in zip(splits, ("train", "validation"), strict=True):
        packed = pack_chats((samples[row] for row in rows), options.seq_len)
        for start in range(0, len(packed), size):
            writer.add(_packed_arrays(packed[start : start + size], options.seq_len, padding), name)


def pack_chats(chats: Iterable[ScoredTokens], most: int) -> list[Parts]:
    """Put each chat into the first sample with room for it, of those that are being filled; `most` tokens fit in."""
    packed: list[Parts] = []
    left: list[int] = []
    for chat in chats:
        first = max(0, len(packed) - _OPEN)
        place = next((n for n in range(first, len(packed)) if left[n] >= len(chat.ids)), None)
        if place is None:
            place = len(packed)
            packed.append([])
            left.append(most)
        packed[place].append(chat)
        left[place] -= len(chat.ids)
    return packed


def _packed_arrays(packed: Sequence[Parts], length: int, padding: int) -> Arrays:
    tokens = np.full((len(packed), length), padding, np.int32)
    positions = np.zeros_like(tokens)
    labels = np.full_like(tokens, IGNORE_INDEX)
    for place, parts in enumerate(packed):
        start = 0
        for ids, scored in parts:
            end = start + len(ids)
            tokens[place, start:end], positions[place, start:end] = ids, np.arange(len(ids))
            labels[place, start + 1 : end] = np.where(scored, ids, IGNORE_INDEX)[1:]
            start = end
    return {"input_ids": tokens, "position_ids": positions, "labels": labels}
