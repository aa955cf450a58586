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

from hypha_ray.data.encoders import (
    FOLDER,
    DatasetTokenizer,
    Tokens,
    dataset_tokenizer,
    ends_among,
    load_tokenizer,
)
from hypha_ray.data.kinds.chat_templates import (
    ChatTemplate,
    ignored_values,
    leave_out_ignored,
    note_date,
)
from hypha_ray.data.kinds.kind import Kind, Report, Rows, SliceWriter, no_samples, split, write_split
from hypha_ray.data.kinds.scored_tokens import TextTokenizer
from hypha_ray.data.manifest import Manifest, PreprocessorInfo
from hypha_ray.data.options import PROBLEMS, PrepareOptions
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.data.sources.chats import Chat, with_system
from hypha_ray.data.sources.prompts import ALPHABET, Messages, Prompt, prompts
from hypha_ray.errors import DataError, reason_of
from hypha_ray.rl.rewards.response import pack_records, records_of

_AT_ONCE = 1024
"""Prompts that are tokenised at once."""


def write_prompts(options: PrepareOptions, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the tokenizer beside them.

    Raises:
        DataError: there are no prompts, all are too long, or the tokenizer has no chat template.
        HyphaError: source or tokenizer can't be had.

    """
    all_prompts = list(prompts(options, account))
    generated = options.source.startswith(PROBLEMS)
    tokenizer = dataset_tokenizer(options, [ALPHABET] if generated else _texts(all_prompts))
    if options.chat:
        note_date(tokenizer.base, account)
    encoded = _encoded(tokenizer, all_prompts, options, report, account)
    ids, records = _fitting(all_prompts, encoded, options.seq_len, account)
    if not all_prompts:
        raise no_samples("prompts", options, account, "name another --source, or other columns")
    if not ids:
        problem = f"there are no prompts of up to {options.seq_len} tokens in {options.source}"
        raise DataError("DATA033", problem, account.left_out, "prompts", "raise --seq-len")
    splits = split([row.tobytes() for row in ids], options, account, "prompts")
    arrays = _arrays(ids, records, tokenizer.padding)

    def load(rows: Rows) -> Arrays:
        return {name: array[rows] for name, array in arrays.items()}

    write_split(splits, load, options.samples_per_slice, writer)
    writer.tokens = tokenizer.rules(_ends(tokenizer))
    return tokenizer.save(writer.folder)


def _arrays(ids: Sequence[Tokens], records: Sequence[dict[str, Any]], padding: int) -> Arrays:
    """Tensors of all prompts, padded with a token."""
    longest = max(map(len, ids))
    tokens = np.full((len(ids), longest), padding, np.int32)
    mask = np.zeros_like(tokens)
    for row, prompt in enumerate(ids):
        tokens[row, -len(prompt) :] = prompt
        mask[row, -len(prompt) :] = 1
    return {"input_ids": tokens, "attention_mask": mask, "reward_data": pack_records(records)}


def _ends(tokenizer: DatasetTokenizer) -> list[int]:
    """The tokens that end answers: the template's, as far as they are known, and the tokenizer's."""
    ends = [tokenizer.end]
    if tokenizer.is_templated and tokenizer.base.is_fast:
        chat = Chat("", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}])
        with suppress(DataError):  # Templates may refuse short chats, or leave open what the assistant wrote.
            text = ChatTemplate(tokenizer.base, tokenizer.name).rendered(chat)
            sample = TextTokenizer(tokenizer.base, literal=False).tokenized([text])[0]
            last_ids = sample.ids[sample.scored][-1:].tolist()
            ends = [*ends_among(tokenizer.base, last_ids), *ends]
    return list(dict.fromkeys(ends))


def _texts(prompts: Iterable[Prompt]) -> Iterator[str]:
    for prompt in prompts:
        yield f"{prompt.text}{prompt.system or ''}"
        yield str(prompt.data.get("answer", ""))


def _encoded(
    tokenizer: DatasetTokenizer, prompts: Sequence[Prompt], options: PrepareOptions, report: Report, account: Account
) -> Iterator[list[int]]:
    """Token ids of prompts. Text is taken literally, except special tokens of a chat.

    A prompt begins as the tokenizer begins a text, or as the template does.
    """
    begin = () if options.chat else tokenizer.begin
    for start in range(0, len(prompts), _AT_ONCE):
        batch = prompts[start : start + _AT_ONCE]
        if options.chat:
            texts = [_chat(tokenizer.base, prompt, options, account) for prompt in batch]
        else:
            texts = [str(prompt.text) for prompt in batch]
        encoded = tokenizer.base(
            texts,
            add_special_tokens=False,
            split_special_tokens=not options.chat,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for ids in encoded["input_ids"]:
            yield [*begin, *ids] if ids else []
        report("prompts", len(batch))


def _chat(tokenizer: Any, prompt: Prompt, options: PrepareOptions, account: Account) -> str:
    """A prompt in the chat template, up to the model's answer; values that the template ignores are counted."""
    text = prompt.text
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    messages = with_system(messages, prompt.system, options)
    opened = _opened(tokenizer, prompt.tools, messages)
    ignored = ignored_values(partial(_opened, tokenizer, prompt.tools), messages, opened)
    leave_out_ignored(account, [ignored])
    if prompt.tools is not None and _opened(tokenizer, None, messages) == opened:
        account.leave_out("lists of tools", "which the chat template ignores")
    return opened


def _opened(tokenizer: Any, tools: list[Any] | None, messages: Messages) -> str:
    """Text of messages with the generation prompt behind them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # Templates raise errors of their own, for instance without system messages.
        got = reason_of(error)
        problem = "the tokenizer's chat template doesn't take these prompts"
        fix = "leave out --system, or --chat"
        raise DataError("DATA034", problem, got, fix=fix) from None


def _fitting(
    prompts: Iterable[Prompt], encoded: Iterable[list[int]], most_tokens: int, account: Account
) -> tuple[list[Tokens], list[dict[str, Any]]]:
    """Tokens and records of prompts that have tokens and aren't too long; the others are put into the account."""
    ids = []
    records = []
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            account.leave_out("prompts", "without tokens")
        elif len(tokens) > most_tokens:
            account.leave_out("prompts", f"longer than {most_tokens} tokens, see --seq-len")
        else:
            ids.append(np.array(tokens, np.int32))
            records.append(prompt.data)
    return ids, records


@dataclass(frozen=True, slots=True)
class Preview:
    """Figures of a prepared dataset of prompts, as a text."""

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
    different: dict[str, set[bytes]] = {}
    lengths_of_slices = []
    first_arrays: Arrays = {}
    for info in manifest.slices:
        arrays = read_slice(folder, info, manifest)
        first_arrays = first_arrays or arrays
        different.setdefault(info.split, set()).update(row.tobytes() for row in arrays["input_ids"])
        lengths_of_slices.append(arrays["attention_mask"].sum(axis=1))
    lengths = np.concatenate(lengths_of_slices)
    is_token = first_arrays["attention_mask"][0] == 1
    ids = first_arrays["input_ids"][0][is_token]
    return Preview(
        different={split: len(rows) for split, rows in different.items()},
        shortest=int(lengths.min()),
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        prompt=load_tokenizer(str(folder / FOLDER)).decode(ids),
        record=records_of(first_arrays["reward_data"][:1])[0],
    )


KIND: Final = Kind(write_prompts, "prompts", "prompt and answer are")
