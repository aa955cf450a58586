"""From prompts to a prepared dataset.

 prompts ─► encoded ─┬─► held out: some of the different prompts, with their repetitions ─► validation slices
                     └─► the rest, shuffled ──────────────────────────────────────────────► training slices

Tensors: ``input_ids`` and ``attention_mask``, int32 [N, P], padded on the left to the longest prompt; ``reward_data``,
uint8 [N, A], the record for rewards in JSON. Prompts are held in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from hypha_ray.data.manifest import Manifest, PreprocessorInfo
from hypha_ray.data.preparation.encoders import (
    FOLDER,
    Tokens,
    begin_of,
    ends_among,
    load_tokenizer,
    padding_of,
    require_end,
    save_tokenizer,
    token_rules,
    tokenizer_of,
)
from hypha_ray.data.preparation.kinds.chat_templates import ChatTemplate, ignored_values, leave_out_ignored
from hypha_ray.data.preparation.kinds.kind import Kind
from hypha_ray.data.preparation.kinds.scored_tokens import TextTokenizer
from hypha_ray.data.preparation.options import PROBLEMS, Options
from hypha_ray.data.preparation.slice_writer import Report, SliceWriter, split, write_split
from hypha_ray.data.preparation.sources.chats import Chat
from hypha_ray.data.preparation.sources.generated import ALPHABET
from hypha_ray.data.preparation.sources.prompts import Messages, Prompt, prompts
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.errors import DataError, reason_of
from hypha_ray.rl.reward_data import records_of
from hypha_ray.types.records import pack_records

_AT_ONCE = 1024
"""Prompts that are tokenised at once."""


def write_prompts(options: Options, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the tokenizer beside them.

    Raises:
        DataError: there are no prompts, all are too long, or the tokenizer has no chat template.
        HyphaError: source or tokenizer can't be had.

    """
    found = list(prompts(options, account))
    generated = options.source.startswith(PROBLEMS)
    tokenizer = tokenizer_of(options, [ALPHABET] if generated else _texts(found))
    ids, records = _fitting(found, _encoded(tokenizer, found, options, report, account), options.seq_len, account)
    if not found:
        fix = "name another --source, or other columns"
        raise DataError(
            "DATA033", f"there are no prompts in {options.source}", account.left_out or "an empty source", fix=fix
        )
    if not ids:
        what = f"there are no prompts of up to {options.seq_len} tokens in {options.source}"
        raise DataError("DATA033", what, account.left_out, "prompts", "raise --seq-len")
    splits = split([row.tobytes() for row in ids], options, account, "prompts")
    arrays = _arrays(ids, records, padding_of(tokenizer, options.tokenizer))
    size = options.samples_per_slice
    write_split(splits, lambda rows: {key: array[rows] for key, array in arrays.items()}, size, writer)
    writer.tokens = token_rules(tokenizer, _ends(tokenizer, options), templated=options.chat)
    return save_tokenizer(tokenizer, writer.folder, options.tokenizer, options.tokenizer_revision)


def _arrays(ids: Sequence[Tokens], records: Sequence[dict[str, Any]], padding: int) -> Arrays:
    """Tensors of all prompts, padded with a token."""
    tokens = np.full((len(ids), max(map(len, ids))), padding, np.int32)
    mask = np.zeros_like(tokens)
    for row, prompt in enumerate(ids):
        tokens[row, -len(prompt) :] = prompt
        mask[row, -len(prompt) :] = 1
    return {"input_ids": tokens, "attention_mask": mask, "reward_data": pack_records(records)}


def _ends(tokenizer: Any, options: Options) -> list[int]:
    """The tokens that end answers: the template's, as far as it tells, and the tokenizer's."""
    ends = [require_end(tokenizer, options.tokenizer)]
    if options.chat and tokenizer.is_fast:
        asked, answered = ({"role": role, "content": "a"} for role in ("user", "assistant"))
        with suppress(DataError):  # Templates may refuse short chats, or leave open what the assistant wrote.
            text = ChatTemplate(tokenizer, options.tokenizer).rendered(Chat("", [asked, answered]))
            sample = TextTokenizer(tokenizer, literal=False).tokenized([text])[0]
            ends = [*ends_among(tokenizer, sample.ids[sample.scored][-1:].tolist()), *ends]
    return list(dict.fromkeys(ends))


def _texts(found: Iterable[Prompt]) -> Iterator[str]:
    for prompt in found:
        yield from (str(prompt.text), str(prompt.data.get("answer", "")))


def _encoded(
    tokenizer: Any, found: Sequence[Prompt], options: Options, report: Report, account: Account
) -> Iterator[list[int]]:
    """Token ids of prompts. Text is taken literally, but for special tokens of a chat.

    A prompt begins as the tokenizer begins a text, or as the template does.
    """
    begin = [] if options.chat else list(begin_of(tokenizer))
    for start in range(0, len(found), _AT_ONCE):
        part = found[start : start + _AT_ONCE]
        texts = [_chat(tokenizer, one.text, options.system, account) if options.chat else str(one.text) for one in part]
        encoded = tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=not options.chat,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        yield from ([*begin, *ids] if ids else [] for ids in encoded["input_ids"])
        report("prompts", len(part))


def _chat(tokenizer: Any, text: str | Messages, system: str | None, account: Account) -> str:
    """A prompt in the tokenizer's chat template, up to where the model answers; what that ignores is counted."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    first = [] if system is None else [{"role": "system", "content": system}]
    opened = _opened(tokenizer, [*first, *messages])
    leave_out_ignored(account, [ignored_values(partial(_opened, tokenizer), [*first, *messages], opened)])
    return opened


def _opened(tokenizer: Any, messages: Messages) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # Templates raise errors of their own, for instance without system messages.
        got = reason_of(error)
        what = "the tokenizer's chat template doesn't take these prompts"
        fix = "leave out --system, or --chat"
        raise DataError("DATA034", what, got, fix=fix) from None


def _fitting(
    found: Iterable[Prompt], encoded: Iterable[list[int]], most: int, account: Account
) -> tuple[list[Tokens], list[dict[str, Any]]]:
    """Prompts that have tokens and aren't too long, and their records; the others are put into the account."""
    ids = []
    records = []
    for prompt, tokens in zip(found, encoded, strict=True):
        if not 0 < len(tokens) <= most:
            account.leave_out("prompts", f"longer than {most} tokens, see --seq-len" if tokens else "without tokens")
            continue
        ids.append(np.array(tokens, np.int32))
        records.append(prompt.data)
    return ids, records


@dataclass(frozen=True, slots=True)
class Preview:
    """Figures of a prepared dataset of prompts, for people."""

    different: dict[str, int]
    """Different prompts by split."""
    shortest: int
    """Length of the shortest prompt, in tokens."""
    mean: float
    """Mean length of the prompts, in tokens."""
    longest: int
    """Length of the longest prompt, in tokens."""
    prompt: str
    """Text of the first prompt of the first slice, special tokens included."""
    record: dict[str, Any]
    """Record of the same prompt."""


def preview(folder: Path, manifest: Manifest) -> Preview:
    """Figures of a dataset, read from its slices.

    Raises:
        DataError: a slice is missing or damaged.

    """
    different: dict[str, set[bytes]] = {info.split: set() for info in manifest.slices}
    slices = [(info.split, read_slice(folder, info, manifest)) for info in manifest.slices]
    for name, arrays in slices:
        different[name].update(row.tobytes() for row in arrays["input_ids"])
    lengths = np.concatenate([arrays["attention_mask"].sum(axis=1) for _, arrays in slices])
    first = slices[0][1]
    ids = first["input_ids"][0][first["attention_mask"][0] == 1]
    return Preview(
        {name: len(found) for name, found in different.items()},
        int(lengths.min()),
        float(lengths.mean()),
        int(lengths.max()),
        load_tokenizer(str(folder / FOLDER)).decode(ids),
        records_of(first["reward_data"][:1])[0],
    )


KIND: Final = Kind(write_prompts, "prompts", "prompt and answer are")
