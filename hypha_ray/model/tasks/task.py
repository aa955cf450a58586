"""Kind of a model: its transformers Auto class, what it is fed, and how its labels are made and counted.

Nothing here imports torch: looking a task up costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from hypha_ray.errors import DataError
from hypha_ray.model.tasks.masking import Masking, SampleKeys, mask_tokens, missing_mask_token

Batch: TypeAlias = Mapping[str, Any]
"""Torch tensors by name, samples along the first axis."""
Labels: TypeAlias = Literal[
    "shifted", "masked", "positions", "samples", "pixels", "patches", "spans", "series", "frames"
]
"""Where labels come from, and what is counted as one score.

*shifted*: the input itself or the slice's labels, each token scored by what stands before it. *masked*: the input
itself, scored where it was hidden, or the slice's labels. *positions*: the slice's labels, each one scored. *samples*:
the slice's labels, one score a sample. *pixels*: the slice's labels, one score a pixel. *patches*: the input itself,
scored where it was hidden. *spans*: a first and a last token for each sample. *series*: future values that were
observed. *frames*: the slice's labels, one score a frame of a spectrogram.
"""

IGNORE_INDEX = -100
"""The label that transformers' losses leave out."""
OUTSIDE = 1 << 30
"""A position that lies outside of every sequence, which losses of spans leave out."""
_NUMBERS = frozenset({"pixel_values", "pixel_values_videos", "input_values", "input_features"}) | {
    "mask_labels",
    "past_values",
    "future_values",
}
"""Keywords for floats, whatever whole numbers a slice has."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of model.

    `tensors` pairs a slice's tensor with the model's keyword for it; a slice may use either name. `optional` are
    keywords that a slice may lack.
    """

    name: str
    auto_class: str
    modality: str
    tensors: tuple[tuple[str, str], ...]
    labels: Labels = "samples"
    classifies: bool = False
    """The model gives scores for classes, and an accuracy makes sense."""
    optional: frozenset[str] = frozenset({"attention_mask"})
    perplexity: bool = False
    """The loss is the cross entropy of tokens, and a perplexity makes sense."""
    masking: Masking | None = None
    accepts: frozenset[str] = frozenset()
    """Further keywords of a model that slices are looked into for."""
    ignored: int = IGNORE_INDEX
    """The label that isn't scored."""
    measures: bool = False
    """Labels are measures or several truths at once, and no classes: always floats."""
    caches: bool = False
    """The model fills a key/value cache unless it is told not to."""
    summed: bool = False
    """The model's own loss is a sum over what the task counts, not a mean."""

    def inputs(self, batch: Batch, keys: SampleKeys | None = None, seed: int = 0) -> dict[str, Any]:
        """Return the model's keyword arguments for a batch of slice tensors, labels included.

        Args:
            batch: slice tensors, samples along the first axis.
            keys: which samples these are, int64 [N, 3] of epoch, slice and index; None: they are counted from 0.
            seed: with the keys it chooses the tokens that a masked language model has to guess.

        Raises:
            DataError: the batch lacks a tensor.
            ConfigError: a masked language model without a mask token.

        """
        inputs = {keyword: tensor for _, keyword, tensor in self.fed(batch)}
        ids = inputs.get("input_ids")
        if "labels" in inputs or ids is None:
            pass
        elif self.labels == "shifted":
            inputs["labels"] = _without_padding(ids, batch)
        elif self.labels == "masked":
            inputs["input_ids"], inputs["labels"] = self._mask(ids, batch, keys, seed)
        if self.labels == "spans":
            _leave_out(inputs)
        return inputs

    def fed(self, batch: Batch) -> list[tuple[str, str, Any]]:
        """Return the tensors of slices that the model is given: name in the slice, keyword of the model, and tensor.

        Raises:
            DataError: the batch lacks a tensor.

        """
        for name, keyword in self.tensors:
            if name not in batch and keyword not in batch and keyword not in self.optional:
                raise self._lacks(name, batch)
        found = [(name if name in batch else keyword, keyword) for name, keyword in self.tensors]
        known = {name for name, _ in found} | {keyword for _, keyword in found}
        further = [(name, name) for name in batch if name in self.accepts - known and self._labelled(name, batch)]
        pairs = [(name, keyword) for name, keyword in (*found, *further) if name in batch]
        return [(name, keyword, self._typed(keyword, batch[name])) for name, keyword in pairs]

    def count(self, inputs: Batch) -> int:
        """Return the number of scores that the loss is a mean over."""
        labels = inputs.get("labels")
        match self.labels:
            case "spans" if "start_positions" in inputs:
                return int((inputs["start_positions"] < OUTSIDE).sum())
            case "patches" if "bool_masked_pos" in inputs:
                return int(inputs["bool_masked_pos"].sum())
            case "series" if "future_observed_mask" in inputs:
                return int(inputs["future_observed_mask"].sum())
            case "frames" if labels is not None:
                return int((labels != self.ignored).any(-1).sum())
        if labels is None or labels.is_floating_point() or (self.labels == "samples" and labels.ndim != 1):
            return len(next(iter(inputs.values())))
        scored = labels[..., 1:] if self.labels == "shifted" else labels
        return int((scored != self.ignored).sum())

    def _labelled(self, name: str, batch: Batch) -> bool:
        """Whether a tensor is no label, or one of this task: a language model's are one for each token."""
        ids = batch.get("input_ids")
        if name != "labels" or self.labels not in ("shifted", "masked") or ids is None:
            return True
        return bool(batch[name].shape == ids.shape)

    def _typed(self, keyword: str, tensor: Any) -> Any:
        """Return a tensor in the type that models take: int64, float32 or bool; token ids may be int32."""
        if keyword == "bool_masked_pos":
            return tensor.bool()
        if tensor.is_floating_point() or keyword in _NUMBERS or (keyword == "labels" and self.measures):
            return tensor.float()
        kind = str(tensor.dtype)
        return tensor if kind == "torch.bool" or (keyword, kind) == ("input_ids", "torch.int32") else tensor.long()

    def _lacks(self, name: str, batch: Batch) -> DataError:
        return DataError(
            "DATA050",
            f"slices lack the tensor {name!r}, which a {self.name} model is fed",
            ", ".join(sorted(batch)) or "no tensors",
            fix="prepare the dataset for this task, or choose tensors with model.input_names",
        )

    def _mask(self, ids: Any, batch: Batch, keys: SampleKeys | None, seed: int) -> tuple[Any, Any]:
        if self.masking is None:
            raise missing_mask_token(self.name)
        labels, tokens = _without_padding(ids, batch), ids.numpy()
        if keys is None:
            keys = np.stack([np.zeros(len(ids), np.int64)] * 2 + [np.arange(len(ids))], axis=1)
        fixed = (labels == IGNORE_INDEX).numpy() | np.isin(tokens, self.masking.special_ids)
        hidden, chosen = mask_tokens(tokens, fixed, self.masking, keys, seed)
        return ids.new_tensor(hidden), labels.masked_fill(labels.new_tensor(~chosen).bool(), IGNORE_INDEX)


def _without_padding(ids: Any, batch: Batch) -> Any:
    """Tokens as labels, but for padding, which a slice tells of even where the model isn't given the mask."""
    mask = batch.get("attention_mask")
    return ids.long() if mask is None or mask.shape != ids.shape else ids.long().masked_fill(mask == 0, IGNORE_INDEX)


def _leave_out(inputs: dict[str, Any]) -> None:
    """Leave spans out of which either end lies outside of the sequence, as an answer that was cut off does."""
    ends = [name for name in ("start_positions", "end_positions") if name in inputs]
    if "input_ids" in inputs and len(ends) == 2:
        length = inputs["input_ids"].shape[-1]
        outside = (inputs[ends[0]] >= length) | (inputs[ends[1]] >= length)
        for name in ends:
            inputs[name] = inputs[name].masked_fill(outside, OUTSIDE)
