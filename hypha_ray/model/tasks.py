"""What a model is for: its transformers Auto class, what it is fed, and how its labels are made.

`TASKS` is the one table. Class names are strings and torch is imported on use, so that looking a task up costs nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from hypha_ray.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch

Batch: TypeAlias = "Mapping[str, torch.Tensor]"
Labels: TypeAlias = Literal["shifted", "masked", "positions", "samples"]
"""Where labels come from and what a scored position is.

*shifted*: the input itself, each token scored by what stands before it. *masked*: the input itself, scored where it was
hidden. *positions*: the slice's labels, each one scored. *samples*: the slice's labels, one score a sample.
"""

IGNORED = -100
"""The label that transformers' losses leave out."""
MASKED_FRACTION = 0.15
"""Part of the tokens that a masked language model has to guess (BERT, arXiv 1810.04805, §3.1)."""


@dataclass(frozen=True, slots=True)
class Masking:
    """What hiding tokens needs to know of a vocabulary."""

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...] = ()
    """Tokens that are never hidden, such as separators."""


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
    masking: Masking | None = None

    def inputs(self, batch: Batch, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        """Return the model's keyword arguments for a batch of slice tensors, labels included.

        Args:
            batch: slice tensors, samples along the first axis.
            generator: chooses the tokens that a masked language model has to guess; other tasks don't use it.

        Raises:
            DataError: the batch lacks a tensor.
            ConfigError: a masked language model without a mask token.

        """
        found = {keyword: self._tensor(batch, name, keyword) for name, keyword in self.tensors}
        inputs = {keyword: tensor for keyword, tensor in found.items() if tensor is not None}
        if "labels" in inputs:
            inputs["labels"] = _labels(inputs["labels"])
        elif "input_ids" not in inputs:
            return inputs
        elif self.labels == "shifted":
            inputs["labels"] = _without_padding(inputs["input_ids"], inputs.get("attention_mask"))
        elif self.labels == "masked":
            inputs["input_ids"], inputs["labels"] = self._mask(inputs, generator)
        return inputs

    def count(self, inputs: Batch) -> int:
        """Return the number of label positions that the loss is a mean over."""
        labels = inputs.get("labels")
        if labels is None or labels.is_floating_point() or (self.labels == "samples" and labels.ndim != 1):
            return len(next(iter(inputs.values())))
        scored = labels[..., 1:] if self.labels == "shifted" else labels
        return int((scored != IGNORED).sum())

    def _tensor(self, batch: Batch, name: str, keyword: str) -> torch.Tensor | None:
        tensor = batch[name] if name in batch else batch.get(keyword)
        if tensor is None and keyword not in self.optional:
            raise DataError(
                "DATA050",
                f"slices lack the tensor {name!r}, which a {self.name} model is fed",
                ", ".join(sorted(batch)) or "no tensors",
                fix="prepare the dataset for this task, or choose tensors with model.input_names",
            )
        return tensor

    def _mask(self, inputs: Batch, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.masking is None:
            raise ConfigError(
                "MODEL007",
                f"a {self.name} model needs a mask token, and neither tokenizer nor model configuration has one",
                fix="name a tokenizer with a mask token in preprocessor.repository",
            )
        labels = _without_padding(inputs["input_ids"], inputs.get("attention_mask"))
        return _mask(inputs["input_ids"], labels, self.masking, generator)


def _labels(labels: torch.Tensor) -> torch.Tensor:
    """Whole numbers as int64, which losses want; others as they are."""
    return labels if labels.is_floating_point() else labels.long()


def _without_padding(tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    return tokens.long() if attention_mask is None else tokens.long().masked_fill(attention_mask == 0, IGNORED)


def _mask(
    tokens: torch.Tensor, labels: torch.Tensor, masking: Masking, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hide tokens as BERT does: of those chosen 80 % become the mask, 10 % a random token, 10 % stay.

    All random numbers of a sample are drawn together, so that what is hidden doesn't depend on the batch size. Every
    sample has at least one hidden token: a mean over none would be NaN.
    """
    import torch

    draws = torch.rand(*tokens.shape, 3, generator=generator).to(tokens.device).unbind(-1)
    fixed = (labels == IGNORED) | torch.isin(labels, labels.new_tensor(masking.special_ids))
    score = draws[0].masked_fill(fixed, 2.0)
    chosen = (score <= score.amin(-1, keepdim=True).clamp(min=MASKED_FRACTION)) & ~fixed
    random_ids = (draws[2] * masking.vocab_size).to(tokens.dtype)
    changed = torch.where(draws[1] < 0.8, masking.mask_id, random_ids)
    hidden = torch.where(chosen & (draws[1] < 0.9), changed, tokens)
    return hidden, labels.masked_fill(~chosen, IGNORED)


_TEXT = (("input_ids", "input_ids"), ("attention_mask", "attention_mask"))
_IMAGE = (("images", "pixel_values"),)
_VIDEO = (("videos", "pixel_values"),)
_AUDIO = (("audio", "input_values"), ("attention_mask", "attention_mask"))
_SPEECH = (("audio", "input_features"), ("attention_mask", "attention_mask"))
_LABELS = (("labels", "labels"),)
_SPANS = (("start_positions", "start_positions"), ("end_positions", "end_positions"))
_SERIES = tuple(
    (name, name)
    for name in ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features")
)

_TABLE = (
    Task("causal-lm", "AutoModelForCausalLM", "text", _TEXT, "shifted"),
    Task("masked-lm", "AutoModelForMaskedLM", "text", _TEXT, "masked"),
    Task("seq2seq-lm", "AutoModelForSeq2SeqLM", "text", _TEXT + _LABELS, "positions"),
    Task("sequence-classification", "AutoModelForSequenceClassification", "text", _TEXT + _LABELS, classifies=True),
    Task("token-classification", "AutoModelForTokenClassification", "text", _TEXT + _LABELS, "positions", True),
    Task("multiple-choice", "AutoModelForMultipleChoice", "text", _TEXT + _LABELS, classifies=True),
    Task("next-sentence-prediction", "AutoModelForNextSentencePrediction", "text", _TEXT + _LABELS, classifies=True),
    Task("question-answering", "AutoModelForQuestionAnswering", "text", _TEXT + _SPANS),
    Task("table-question-answering", "AutoModelForTableQuestionAnswering", "text", _TEXT + _LABELS, "positions"),
    Task("text-encoding", "AutoModelForTextEncoding", "text", _TEXT),
    Task("image-classification", "AutoModelForImageClassification", "image", _IMAGE + _LABELS, classifies=True),
    Task("masked-image-modeling", "AutoModelForMaskedImageModeling", "image", (*_IMAGE, ("masks", "bool_masked_pos"))),
    Task("zero-shot-image-classification", "AutoModelForZeroShotImageClassification", "image", _TEXT + _IMAGE),
    Task("semantic-segmentation", "AutoModelForSemanticSegmentation", "image", _IMAGE + _LABELS),
    Task("image-segmentation", "AutoModelForImageSegmentation", "image", _IMAGE + _LABELS),
    Task("instance-segmentation", "AutoModelForInstanceSegmentation", "image", _IMAGE + _LABELS),
    Task("universal-segmentation", "AutoModelForUniversalSegmentation", "image", _IMAGE + _LABELS),
    Task("object-detection", "AutoModelForObjectDetection", "image", _IMAGE + _LABELS),
    Task("zero-shot-object-detection", "AutoModelForZeroShotObjectDetection", "image", _TEXT + _IMAGE + _LABELS),
    Task("depth-estimation", "AutoModelForDepthEstimation", "image", _IMAGE + _LABELS),
    Task("normal-estimation", "AutoModelForNormalEstimation", "image", _IMAGE + _LABELS),
    Task("pointmap-estimation", "AutoModelForPointmapEstimation", "image", _IMAGE + _LABELS),
    Task("pose-estimation", "AutoModelForPoseEstimation", "image", _IMAGE + _LABELS),
    Task("keypoint-detection", "AutoModelForKeypointDetection", "image", _IMAGE + _LABELS),
    Task("keypoint-matching", "AutoModelForKeypointMatching", "image", _IMAGE + _LABELS),
    Task("image-matting", "AutoModelForImageMatting", "image", _IMAGE + _LABELS),
    Task("image-to-image", "AutoModelForImageToImage", "image", _IMAGE + _LABELS),
    Task("mask-generation", "AutoModelForMaskGeneration", "image", _IMAGE),
    Task("text-recognition", "AutoModelForTextRecognition", "image", _IMAGE + _LABELS, "positions"),
    Task("table-recognition", "AutoModelForTableRecognition", "image", _IMAGE + _LABELS, "positions"),
    Task("video-classification", "AutoModelForVideoClassification", "video", _VIDEO + _LABELS, classifies=True),
    Task("image-text-to-text", "AutoModelForImageTextToText", "image", _TEXT + _IMAGE, "shifted"),
    Task("multimodal-lm", "AutoModelForMultimodalLM", "image", _TEXT + _IMAGE, "shifted"),
    Task("visual-question-answering", "AutoModelForVisualQuestionAnswering", "image", _TEXT + _IMAGE + _LABELS),
    Task("document-question-answering", "AutoModelForDocumentQuestionAnswering", "image", _TEXT + _IMAGE + _SPANS),
    Task("audio-classification", "AutoModelForAudioClassification", "audio", _AUDIO + _LABELS, classifies=True),
    Task("audio-frame-classification", "AutoModelForAudioFrameClassification", "audio", _AUDIO + _LABELS),
    Task("audio-x-vector", "AutoModelForAudioXVector", "audio", _AUDIO + _LABELS, classifies=True),
    Task("audio-tokenization", "AutoModelForAudioTokenization", "audio", _AUDIO),
    Task("ctc", "AutoModelForCTC", "audio", _AUDIO + _LABELS),
    Task("rnnt", "AutoModelForRNNT", "audio", _SPEECH + _LABELS),
    Task("tdt", "AutoModelForTDT", "audio", _SPEECH + _LABELS),
    Task("speech-seq2seq", "AutoModelForSpeechSeq2Seq", "audio", _SPEECH + _LABELS, "positions"),
    Task("text-to-spectrogram", "AutoModelForTextToSpectrogram", "text", _TEXT + _LABELS),
    Task("text-to-waveform", "AutoModelForTextToWaveform", "text", _TEXT + _LABELS),
    Task("time-series-prediction", "AutoModelForTimeSeriesPrediction", "series", _SERIES),
    Task("decision", "AutoModelForDecision", "series", (("states", "states"), ("actions", "actions"))),
    Task("pretraining", "AutoModelForPreTraining", "text", _TEXT + _LABELS, "positions"),
    Task("auto", "AutoModel", "text", _TEXT + _LABELS),
)

_ALIASES = {
    "text-generation": "causal-lm",
    "language-modeling": "causal-lm",
    "fill-mask": "masked-lm",
    "seq2-seq-lm": "seq2seq-lm",
    "seq-2-seq-lm": "seq2seq-lm",
    "text-classification": "sequence-classification",
    "vision-classification": "image-classification",
    "vision2seq": "image-text-to-text",
    "vision2-seq": "image-text-to-text",
    "vision-2-seq": "image-text-to-text",
    "vison2-seq": "image-text-to-text",
    "speech-seq2-seq": "speech-seq2seq",
    "speech-seq-2-seq": "speech-seq2seq",
    "automatic-speech-recognition": "speech-seq2seq",
    "pre-training": "pretraining",
}

TASKS: dict[str, Task] = {task.name: task for task in _TABLE}
"""Every task by its name and by the other names that are in use for it."""
TASKS |= {alias: TASKS[name] for alias, name in _ALIASES.items()}


def find_task(name: str, input_names: Sequence[str] | None = None) -> Task:
    """Look a task up, whatever the spelling of its hyphens.

    Args:
        name: a key of `TASKS`.
        input_names: slice tensors to pass to the model under their own names, instead of the task's; with `labels`
            among them the task makes none.

    Raises:
        ConfigError: there is no such task; the nearest one is named.

    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key not in TASKS:
        near = difflib.get_close_matches(key, TASKS, n=1, cutoff=0)[0]
        raise ConfigError(
            "MODEL001",
            "model.type is unknown",
            repr(name),
            f"{len(_TABLE)} tasks, see docs/configuration.md",
            fix=f"did you mean {near!r}?",
        )
    task = TASKS[key]
    if input_names is None:
        return task
    return replace(task, tensors=tuple((given, given) for given in input_names), optional=frozenset())
