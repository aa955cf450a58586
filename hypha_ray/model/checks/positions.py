"""Longest sequence that a model has positions for, read off its modules instead of its configuration.

Families have many names for the limit, reserve positions for padding, or name a limit without effect, as models with
rotary positions do. Only a table of positions that are looked up limits anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.errors import DataError
from hypha_ray.model.task import Task

_TABLE: Final = re.compile(r"(^|\.)(wpe|positions_embed|embed_positions|position_embeddings?|pos_emb)$")
_OF_IMAGES: Final = re.compile(r"vision|visual|image|audio|speech")


def max_positions(model: torch.nn.Module, *, decoder: bool) -> int | None:
    """Return the number of tokens that a model has positions for; None: unlimited.

    Args:
        model: model with or without weights.
        decoder: ask the decoder of an encoder-decoder, which is given the labels, instead of the encoder.

    """
    config = getattr(model, "config", None)
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    if decoder and not is_encoder_decoder:
        return None
    sizes: list[int] = []
    for name, size in _tables(model):
        is_of_decoder = "decoder" in name.split(".")
        if not is_encoder_decoder or decoder == is_of_decoder:
            sizes.append(size)
    return min(sizes, default=None)


def require_positions(
    model: torch.nn.Module, task: Task, shapes: Mapping[str, tuple[int, ...]], subject: str, response: int = 0
) -> None:
    """Refuse sequences that are longer than the model has positions for.

    Args:
        model: model with or without weights.
        task: task of the model.
        shapes: shape of one sample of each tensor of the dataset.
        subject: words for the dataset, such as ``dataset 'texts'``.
        response: largest number of tokens that the model adds to each sequence.

    Raises:
        DataError: sequences are longer.

    """
    limits = [("input_ids", max_positions(model, decoder=False))]
    if task.labels == "positions":
        limits += [("labels", max_positions(model, decoder=True))]
    for name, limit in limits:
        *_, longest = shapes.get(name) or (0,)
        if limit is not None and longest + response > limit:
            problem = f"the sequences of {subject} are too long for the model"
            fix = "prepare the dataset with a shorter --seq-len, or give the model more positions"
            if response:
                problem = f"{problem} with a response of {response} tokens"
                fix = f"allow shorter responses, {fix}"
            raise DataError("DATA024", problem, f"{longest + response} tokens", f"up to {limit}", fix)


def _tables(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Return the name of each table, and the number of tokens that it has positions for."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and _TABLE.search(name) and not _OF_IMAGES.search(name):
            offset = getattr(module, "offset", None)
            if not isinstance(offset, int):
                offset = 0
                if module.padding_idx is not None:  # RoBERTa's positions begin behind that of padding.
                    offset = module.padding_idx + 1
            yield name, module.num_embeddings - offset
    for name, buffer in model.named_buffers():
        if name.endswith("embed_positions") and buffer.ndim == 2 and not _OF_IMAGES.search(name):
            yield name, buffer.shape[0]


def token_counts(arrays: Mapping[str, npt.NDArray[np.generic]]) -> npt.NDArray[np.int64]:
    """Tokens of each sample without padding, [N].

    In packed samples, which have no `attention_mask`, positions count from 0 in each sequence, and are 0 at padding.
    A sequence has two tokens at least, so the number of its ones is that of its beginnings.
    """
    tokens = arrays["input_ids"]
    if "attention_mask" in arrays:
        real = arrays["attention_mask"].astype(np.int64)
    elif "position_ids" in arrays:
        positions = arrays["position_ids"].astype(np.int64)
        real = (positions > 0).astype(np.int64) + (positions == 1)
    else:
        real = np.ones(tokens.shape, np.int64)
    by_sample = real.reshape(len(tokens), -1)
    return np.asarray(by_sample.sum(axis=1), np.int64)
