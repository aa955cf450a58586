"""Several chats in one sample, each without attention to the others.

    input_ids       a a a a b b b c c c c c _ _        chats one after the other, then padding
    position_ids    0 1 2 3 0 1 2 0 1 2 3 4 0 0        from 0 in each chat, and 0 at padding
    labels          - - a a - b b - - c c c - -        -100 at the first token of a chat and at padding

Models of transformers keep tokens apart between which positions don't count on, if there is no ``attention_mask``. Jobs
check that the model does so. All tensors are int32 [N, seq_len].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from hypha_ray.data.preparation.kinds.scored_tokens import ScoredTokens
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import SliceWriter
from hypha_ray.data.preparation.splitting import Rows
from hypha_ray.data.slices import Arrays
from hypha_ray.model.tasks.task import IGNORE_INDEX

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
            writer.add(_arrays(packed[start : start + size], options.seq_len, padding), name)


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


def _arrays(packed: Sequence[Parts], length: int, padding: int) -> Arrays:
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
