"""Task of a model: its Auto class in transformers, its inputs, how labels are made, masked and counted.

Nothing here imports torch, so looking a task up is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable


SampleKeys: TypeAlias = npt.NDArray[np.int64]
"""Keys of a batch's samples, int64 [N, 3]: epoch, slice, and index in the slice's file."""

MASKED_FRACTION = 0.15
"""Fraction of tokens that is masked (BERT, arXiv 1810.04805, §3.1)."""
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id")
Batch: TypeAlias = Mapping[str, Any]
"""Torch tensors by name, samples along the first axis."""
Objective: TypeAlias = Callable[["Task", Any, Batch], Any]
"""Function of a task, a model and its inputs that returns `model.losses.Losses`."""
SampleLoss: TypeAlias = Callable[[Any, Batch], Any]
"""Loss of each sample, [N], by output and inputs of a model."""
Labels: TypeAlias = Literal["shifted", "masked", "positions", "samples", "pixels", "patches", "spans", "frames"]
"""Source of the labels, and unit of a score.

*shifted*: the input or the slice's labels, one score for each token given the tokens before it. *masked*: the input at
masked tokens, or the slice's labels. *positions*: the slice's labels, one score each. *samples*: the slice's labels,
one score for each sample. *pixels*: the slice's labels, one score for each pixel. *patches*: the input at masked
patches. *spans*: first and last token of an answer, one score for each sample. *frames*: the slice's labels, one score
for each frame of a spectrogram.
"""

IGNORE_INDEX = -100
"""Label that transformers' losses ignore."""
OUTSIDE = 1 << 30
"""Position outside of every sequence, which losses of spans ignore."""
_NUMBERS = frozenset({"pixel_values", "pixel_values_videos", "input_values", "input_features"}) | {
    "mask_labels",
    "past_values",
    "future_values",
}
"""Keywords whose tensors are converted to float32, whatever dtype a slice has."""
_UNITS = {"shifted": "tokens", "masked": "tokens", "positions": "tokens", "spans": "samples"}


@dataclass(frozen=True, slots=True)
class Masking:
    """Vocabulary, as far as masking needs it."""

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...] = ()
    """Tokens that are never masked, such as separators."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens of a tokenizer under transformers' names: all that workers need of it."""

    mask_token_id: int | None
    all_special_ids: tuple[int, ...]


def masking_of(config: Any, preprocessor: Any | None) -> Masking | None:
    """Return mask token and special tokens of a tokenizer, otherwise of a model's configuration.

    Args:
        config: configuration of the model, whose vocabulary counts.
        preprocessor: tokenizer, processor with a tokenizer, `SpecialTokens`, or None.

    Returns:
        None if neither has a mask token.

    Raises:
        ConfigError: the mask token is outside of the model's vocabulary.

    """
    text = config.get_text_config()
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    mask_id = getattr(tokenizer, "mask_token_id", None)
    special_ids = tuple(getattr(tokenizer, "all_special_ids", ()))
    if mask_id is None:
        mask_id = getattr(text, "mask_token_id", None)
        if mask_id is None:
            return None
        distinct_ids = {mask_id, *_special_ids(text)} - {None}
        special_ids = tuple(sorted(distinct_ids))
    if not 0 <= mask_id < text.vocab_size:
        raise ConfigError(
            "MODEL007",
            "the mask token isn't in the model's vocabulary",
            f"token {mask_id}",
            f"0 … {text.vocab_size - 1}",
            "use the model's own tokenizer, or give the model a larger vocab_size",
        )
    return Masking(mask_id, text.vocab_size, special_ids)


def missing_mask_token(name: str) -> ConfigError:
    """Return the error for a masked language model without a mask token."""
    return ConfigError(
        "MODEL007",
        f"{name} needs a mask token, and neither tokenizer nor model configuration has one",
        fix="name a tokenizer with a mask token in preprocessor.repository, or set mask_token_id in model.config",
    )


def mask_tokens(
    tokens: npt.NDArray[np.integer[Any]], fixed: npt.NDArray[np.bool_], masking: Masking, keys: SampleKeys, seed: int
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.bool_]]:
    """Mask tokens as BERT does: 80 % of the chosen become the mask, 10 % a random token, 10 % stay.

    A sample has at least one chosen token, unless all of its tokens are fixed.

    Args:
        tokens: token ids, [N, T].
        fixed: tokens that may not be chosen, [N, T].
        masking: vocabulary.
        keys: keys of the samples, [N, 3].
        seed: seed of the choice.

    Returns:
        Ids after masking, and a mask of the chosen tokens.

    """
    draws: list[npt.NDArray[np.float64]] = []
    for key in keys.tolist():
        generator = np.random.default_rng([seed, *key])
        draws.append(generator.random((3, *tokens.shape[1:])))
    choice, kind, replacement = np.stack(draws, axis=1)
    score = np.where(fixed, 2.0, choice)
    token_axes = tuple(range(1, score.ndim))
    lowest = score.min(axis=token_axes, keepdims=True)
    is_masked = (score <= np.maximum(lowest, MASKED_FRACTION)) & ~fixed
    random_ids = (replacement * masking.vocab_size).astype(tokens.dtype)
    mask_id = tokens.dtype.type(masking.mask_id)
    changed_ids = np.where(kind < 0.8, mask_id, random_ids)
    return np.where(is_masked & (kind < 0.9), changed_ids, tokens), is_masked


def _special_ids(config: Any) -> Iterable[int]:
    """Return the special tokens in a configuration, which may be several for one purpose."""
    for name in _SPECIAL:
        value = getattr(config, name, None)
        if isinstance(value, int):
            yield value
        elif value:
            yield from value


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a model."""

    name: str
    auto_class: str
    """Name of the Auto class in transformers."""
    modality: str
    tensors: tuple[tuple[str, str], ...]
    """Pairs of a tensor in slices and the model's keyword for it; a slice may use either name."""
    labels: Labels = "samples"
    classifies: bool = False
    """Whether the model scores classes, so that it has an accuracy."""
    optional: frozenset[str] = frozenset({"attention_mask"})
    """Keywords that slices may lack."""
    perplexity: bool = False
    """Whether the loss is the cross entropy of tokens, so that it has a perplexity."""
    masking: Masking | None = None
    """Vocabulary of a masked language model; None for other tasks, or without a mask token."""
    accepts: frozenset[str] = frozenset()
    """Further keywords of the model, fed if slices have a tensor of that name."""
    ignored: int = IGNORE_INDEX
    """Label that isn't scored."""
    measures: bool = False
    """Whether labels are numbers or several classes at once, and so floats."""
    caches: bool = False
    """Whether the model fills a key/value cache by default."""
    summed: bool = False
    """Whether the model's own loss is a sum over scores instead of a mean."""
    own_loss: SampleLoss | None = None
    """Loss of each sample that a job brings, by output and inputs; None: that of the task."""

    objective: Objective | None = None
    """Computation of the losses of preferences, by task, model and inputs; None: samples have a loss of their own."""

    def scored_by(self, loss: SampleLoss) -> Task:
        """Return the task with a loss of each sample instead of its own."""
        return replace(self, own_loss=loss, perplexity=False, summed=False)

    def inputs(self, batch: Batch, keys: SampleKeys | None = None, seed: int = 0) -> dict[str, Any]:
        """Return the model's keyword arguments for a batch of slice tensors, with labels.

        Args:
            batch: slice tensors, samples along the first axis.
            keys: epoch, slice and index of each sample, int64 [N, 3]; None: samples are numbered from 0.
            seed: seed that chooses masked tokens, together with the keys.

        Raises:
            DataError: the batch lacks a tensor.
            ConfigError: a masked language model has no mask token.

        """
        inputs = {keyword: tensor for _, keyword, tensor in self.model_tensors(batch)}
        ids = inputs.get("input_ids")
        lacks_labels = "labels" not in inputs and ids is not None
        if lacks_labels and self.labels == "shifted":
            inputs["labels"] = _without_padding(ids, batch)
        elif lacks_labels and self.labels == "masked":
            inputs["input_ids"], inputs["labels"] = self._mask(ids, batch, keys, seed)
        if self.labels == "spans":
            _ignore_outside(inputs)
        return inputs

    def require_tensors(self, names: Collection[str]) -> None:
        """Refuse slices that lack a tensor that the model is fed.

        Raises:
            DataError: DATA050.

        """
        for name, keyword in self.tensors:
            if name not in names and keyword not in names and keyword not in self.optional:
                problem = f"slices lack the tensor {name!r}, which {self.name} models are fed"
                got = ", ".join(sorted(names)) or "no tensors"
                fix = "prepare the dataset for this task, or choose tensors with model.input_names"
                raise DataError("DATA050", problem, got, fix=fix)

    def model_tensors(self, batch: Batch) -> list[tuple[str, str, Any]]:
        """Return the tensors that the model is fed: name in the slice, keyword of the model, and tensor.

        Raises:
            DataError: the batch lacks a tensor.

        """
        self.require_tensors(batch.keys())
        pairs: list[tuple[str, str]] = []
        for name, keyword in self.tensors:
            pairs.append((name if name in batch else keyword, keyword))
        listed_names = {name for pair in pairs for name in pair}
        for name in batch:
            if name in self.accepts and name not in listed_names and self._takes_labels(name, batch):
                pairs.append((name, name))
        return [(name, keyword, self._typed(keyword, batch[name])) for name, keyword in pairs if name in batch]

    def count(self, inputs: Batch) -> int:
        """Return the number of scores in the loss."""
        if self.counts_samples:
            return batch_size(inputs)
        return self.label_count(inputs)

    def label_count(self, inputs: Batch) -> int:
        """Return the number of labels that aren't ignored, which is that of scores in the task's own loss."""
        labels = inputs.get("labels")
        match self.labels:
            case "spans" if "start_positions" in inputs:
                is_scored = inputs["start_positions"] < OUTSIDE
            case "patches" if "bool_masked_pos" in inputs:
                is_scored = inputs["bool_masked_pos"]
            case "frames" if labels is not None:
                is_scored = (labels != self.ignored).any(-1)
            case _ if labels is None or labels.is_floating_point():
                return batch_size(inputs)
            case "samples" if labels.ndim != 1:
                return batch_size(inputs)
            case "shifted":
                is_scored = labels[..., 1:] != self.ignored
            case _:
                is_scored = labels != self.ignored
        return int(is_scored.sum())

    @property
    def counts_samples(self) -> bool:
        """Whether each sample has one score, whatever its labels are."""
        return self.own_loss is not None or self.objective is not None

    @property
    def unit(self) -> str:
        """Name of the scored units, in the plural."""
        if self.counts_samples:
            return "samples"
        return _UNITS.get(self.labels, self.labels)

    def _takes_labels(self, name: str, batch: Batch) -> bool:
        """Return False for labels that aren't the task's: a language model has one label for each token."""
        ids = batch.get("input_ids")
        if name != "labels" or self.labels not in ("shifted", "masked") or ids is None:
            return True
        return bool(batch[name].shape == ids.shape)

    def _typed(self, keyword: str, tensor: Any) -> Any:
        """Return a tensor in a dtype that models take: int64, float32 or bool; token ids may be int32."""
        if keyword == "bool_masked_pos":
            return tensor.bool()
        if tensor.is_floating_point() or keyword in _NUMBERS or (keyword == "labels" and self.measures):
            return tensor.float()
        dtype = str(tensor.dtype)
        if dtype == "torch.bool" or (keyword == "input_ids" and dtype == "torch.int32"):
            return tensor
        return tensor.long()

    def _mask(self, ids: Any, batch: Batch, keys: SampleKeys | None, seed: int) -> tuple[Any, Any]:
        if self.masking is None:
            raise missing_mask_token(self.name)
        labels = _without_padding(ids, batch)
        tokens = ids.numpy()
        if keys is None:
            keys = np.zeros((len(ids), 3), np.int64)
            keys[:, 2] = np.arange(len(ids))
        padding = (labels == IGNORE_INDEX).numpy()
        fixed = padding | np.isin(tokens, self.masking.special_ids)
        hidden, is_masked = mask_tokens(tokens, fixed, self.masking, keys, seed)
        unscored = labels.new_tensor(~is_masked).bool()
        return ids.new_tensor(hidden), labels.masked_fill(unscored, IGNORE_INDEX)


def batch_size(batch: Batch) -> int:
    """Return the number of samples of a batch."""
    return len(next(iter(batch.values())))


def _without_padding(ids: Any, batch: Batch) -> Any:
    """Return tokens as labels, without padding. The slice's mask marks padding even if the model takes no mask."""
    labels = ids.long()
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != ids.shape:
        return labels
    return labels.masked_fill(mask == 0, IGNORE_INDEX)


def _ignore_outside(inputs: dict[str, Any]) -> None:
    """Ignore spans with an end outside of the sequence, as answers have that were cut off."""
    if not {"input_ids", "start_positions", "end_positions"} <= inputs.keys():
        return
    length = inputs["input_ids"].shape[-1]
    starts = inputs["start_positions"]
    ends = inputs["end_positions"]
    outside = (starts >= length) | (ends >= length)
    inputs["start_positions"] = starts.masked_fill(outside, OUTSIDE)
    inputs["end_positions"] = ends.masked_fill(outside, OUTSIDE)
